"""Quantizes float32 ranges to symmetric codes of 4 or 8 bits with a scale for each block."""

# Only element-wise operations and maxima: the same values have the same codes on every rank, for
# any number of threads. Values must be finite; callers check that before. Temporary tensors have
# at most `_CHUNK` elements.

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from paro.quantization.formats import PAD, BlockFormat

_CHUNK = 1 << 20  # elements; a multiple of every block


def encode(
    values: Tensor,
    form: BlockFormat,
    out: Tensor,
    *,
    minus: Tensor | None = None,
    transforms: bool = False,
) -> None:
    """Writes the codes and scales of `values` - `minus`, 1-D tensors, to the bytes `out`.

    `transforms`: of their Hadamard transforms.
    """
    scales, codes = _parts(out, form, values.numel())
    for begin, end in _chunks(values.numel()):
        chunk = values[begin:end].float()
        if minus is not None:
            chunk = chunk - minus[begin:end].float()
        if transforms:
            chunk = hadamard(chunk)
        blocks = _in_blocks(chunk, form.block)
        scale = blocks.abs().amax(1) / form.top
        scale = torch.where(scale == 0, 1.0, scale)  # all zero, or below what float32 can divide by
        first = begin // form.block
        scales[first : first + scale.numel()] = scale
        levels = (blocks / scale[:, None]).round_().clamp_(-form.top, form.top).view(-1)
        # Of the last block only the padded codes are sent, not the whole block.
        _pack(levels[: _padded(end - begin)], form, codes[begin * form.bits // 8 :])


def decode(encoded: Tensor, form: BlockFormat, numel: int) -> Iterator[tuple[slice, Tensor]]:
    """The `numel` float32 values of the bytes `encoded`, in chunks, each with its place."""
    scales, codes = _parts(encoded, form, numel)
    for begin, end in _chunks(numel):
        padded = _padded(end - begin)
        start = begin * form.bits // 8
        levels = _unpack(codes[start : start + padded * form.bits // 8], form)
        blocks = _in_blocks(levels, form.block)
        first = begin // form.block
        blocks *= scales[first : first + blocks.shape[0], None]
        yield slice(begin, end), blocks.view(-1)[: end - begin]


def hadamard(values: Tensor) -> Tensor:
    """The Hadamard transforms of every 32 elements of a float32 tensor, zeros appended.

    Not normalized: applied twice it gives 32 times the values. A single large value, which would
    set the scale of its block alone, is spread over 32.
    """
    spread = _in_blocks(values, PAD)
    half = 1
    while half < PAD:  # butterflies: sums of two, so in a fixed order
        pairs = spread.view(spread.numel() // PAD, PAD // (2 * half), 2, half)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        spread = torch.stack((low + high, low - high), dim=2)
        half *= 2
    return spread.view(-1)


def _parts(encoded: Tensor, form: BlockFormat, numel: int) -> tuple[Tensor, Tensor]:
    """The scales and the codes of an encoded range, as views."""
    assert encoded.dtype == torch.uint8
    assert encoded.numel() == form.num_bytes(numel), f"{encoded.numel()} bytes for {numel} elements"
    cut = form.scale_bytes(numel)
    return encoded[:cut].view(torch.float32), encoded[cut:]


def _chunks(numel: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, numel, _CHUNK):
        yield begin, min(begin + _CHUNK, numel)


def _padded(numel: int) -> int:
    return -(-numel // PAD) * PAD


def _in_blocks(values: Tensor, block: int) -> Tensor:
    """The values as rows of `block` elements, with zeros appended."""
    padded = pad(values, (0, -values.numel() % block))
    return padded.view(padded.numel() // block, block)


def _pack(levels: Tensor, form: BlockFormat, out: Tensor) -> None:
    """Writes whole numbers from -top to top to the first bytes of `out`; both signs are stored."""
    octets = (levels + (form.top + 1)).to(torch.uint8)
    if form.bits == 4:
        octets = octets[0::2] | octets[1::2] << 4
    out[: octets.numel()] = octets


def _unpack(octets: Tensor, form: BlockFormat) -> Tensor:
    if form.bits == 4:
        octets = torch.stack((octets & 15, octets >> 4), dim=1).view(-1)
    return octets.to(torch.float32) - (form.top + 1)
