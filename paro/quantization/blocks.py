"""Quantizes float32 ranges to symmetric codes of 4 or 8 bits with a scale for each block."""

# Only element-wise operations and maxima: the same values have the same codes on every rank, for
# any number of threads. Values must be finite; callers check that before. Temporary tensors have
# at most `_CHUNK` elements.

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from paro.quantization.formats import ERROR_FORM, PAD, BlockFormat, padded
from paro.quantization.ranges import RangeCodes

DEVICES = {"cuda"}  # tests add the CPU, for which Triton has an interpreter
_ERROR_WEIGHT = 0.2  # of what was lost now, in the moving average

_CHUNK = 1 << 20  # elements; a multiple of every block


def encode(
    values: Tensor,
    form: BlockFormat,
    out: Tensor,
    *,
    minus: Tensor | None = None,
    transforms: bool = False,
    error: Tensor | None = None,
) -> None:
    """Write the codes and scales of `values` - `minus`, 1-D tensors, to the bytes `out`.

    `transforms`: of their Hadamard transforms; with `error`, of these plus the error of earlier
    calls. `error` has `error_bytes(values.numel())` bytes, at first 0: the moving average of what
    codes lost, of the transforms, in 8 bits. E <- 0.8 E + 0.2 (X - codes of X) for X = values + E:
    LoCo, arXiv 2407.04480, with the constants of DeepSpeed.
    """
    kernels = choose_kernels(values.device).module
    run = _encode if kernels is None else kernels.encode
    run(values, form, out, minus=minus, transforms=transforms, error=error, weight=_ERROR_WEIGHT)


def decode(encoded: Tensor, form: BlockFormat, out: Tensor, *, adds: bool = False) -> None:
    """Write the values of the bytes `encoded` to the 1-D `out`, or add them in float32."""
    kernels = choose_kernels(out.device).module
    run = _decode if kernels is None else kernels.decode
    run(encoded, form, out, adds=adds)


def split_encoded(
    payload: Tensor, codes: RangeCodes, start: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the scales and codes of the range at `start`, and its uncoded elements, of `dtype`."""
    assert dtype.itemsize == codes.uncoded_bytes, f"{dtype} is not of {codes.uncoded_bytes} bytes"
    coded = codes.num_coded(start)
    cut = codes.form.num_bytes(coded)
    stop = cut + (codes.numel - coded) * dtype.itemsize
    return payload[:cut], payload[cut:stop].view(dtype)


class Chosen(NamedTuple):
    """Triton's kernels, if they run, and a line about them."""

    module: ModuleType | None
    line: str | None = None  # None: there is no choice


@cache
def choose_kernels(device: torch.device) -> Chosen:
    """Triton's kernels on a GPU where they have the bits of torch's operations, else None.

    So ranks with and without them compute the same parameters.
    """
    if device.type not in DEVICES:
        return Chosen(None)
    try:
        from paro.quantization import kernels

        _compare(kernels, device)
    except Exception as error:  # whatever Triton, its compiler or the device's driver raises
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return Chosen(None, f"codes: torch's operations, because Triton fails: {reason}")
    return Chosen(kernels, f"codes: Triton {kernels.VERSION}")


def _compare(kernels: ModuleType, device: torch.device) -> None:
    """Raise `RuntimeError` unless codes and values have the bits of torch's operations."""
    numel = 5000
    values = torch.linspace(-40.0, 40.0, numel, device=device).sin_()
    # The interpreter does not round to bf16.
    kind = torch.float32 if device.type == "cpu" else torch.bfloat16
    for form in (BlockFormat(bits=4, block=128), BlockFormat(bits=8, block=2048)):
        found = []
        for to_codes, from_codes in ((_encode, _decode), (kernels.encode, kernels.decode)):
            codes = torch.zeros(form.num_bytes(numel), dtype=torch.uint8, device=device)
            params = torch.ones(numel, dtype=kind, device=device)
            to_codes(values, form, codes, minus=params, transforms=form.bits == 4)
            from_codes(codes, form, params, adds=True)
            found.append((codes, params))
        if not all(map(torch.equal, *found)):
            raise RuntimeError("results differ from those of torch's operations")


# With torch's operations #


def _encode(
    values: Tensor,
    form: BlockFormat,
    out: Tensor,
    *,
    minus: Tensor | None = None,
    transforms: bool = False,
    error: Tensor | None = None,
    weight: float = 0.0,
) -> None:
    for begin, end in _chunks(values.numel()):
        chunk = values[begin:end].float()
        if minus is not None:
            chunk = chunk - minus[begin:end].float()
        if transforms:
            chunk = hadamard(chunk)
        part = _part(out, form, values.numel(), begin, end)
        if error is None:
            _write(chunk, form, part)
            continue
        assert transforms, "errors are of transforms"
        stop = begin + padded(end - begin)
        remembered = _part(error, ERROR_FORM, padded(values.numel()), begin, stop)
        earlier = _read(remembered, ERROR_FORM, stop - begin)
        chunk += earlier
        _write(chunk, form, part)
        chunk -= _read(part, form, stop - begin)
        # Not lerp_, which fuses the multiplication with the addition on some devices.
        _write(earlier.add_((chunk - earlier).mul_(weight)), ERROR_FORM, remembered)


def _decode(encoded: Tensor, form: BlockFormat, out: Tensor, *, adds: bool) -> None:
    for begin, end in _chunks(out.numel()):
        part = _part(encoded, form, out.numel(), begin, end)
        values, target = _read(part, form, end - begin), out[begin:end]
        target.copy_(target.float() + values if adds else values)


def hadamard(values: Tensor) -> Tensor:
    """Return the Hadamard transforms of every 32 elements of a float32 tensor, zeros appended.

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


class _Part(NamedTuple):
    """The scales and the codes of a chunk, as views of an encoded range."""

    scales: Tensor
    codes: Tensor


def _part(encoded: Tensor, form: BlockFormat, numel: int, begin: int, end: int) -> _Part:
    """Of the elements [begin, end) of `numel`; `begin` is that of a chunk."""
    assert encoded.dtype == torch.uint8
    assert encoded.numel() == form.num_bytes(numel), f"{encoded.numel()} bytes for {numel} elements"
    cut, first = form.scale_bytes(numel), begin // form.block
    scales = encoded[:cut].view(torch.float32)[first : first + form.num_blocks(end - begin)]
    start, length = cut + begin * form.bits // 8, padded(end - begin) * form.bits // 8
    return _Part(scales, encoded[start : start + length])


def _write(values: Tensor, form: BlockFormat, part: _Part) -> None:
    """Encode one chunk of float32 values, of which only the padded codes of a block are kept."""
    blocks = _in_blocks(values, form.block)
    largest = blocks.abs().amax(1)
    # By a tensor: on a GPU torch divides by a number by multiplying with its reciprocal.
    scale = largest / torch.full_like(largest, form.top)
    scale = torch.where(scale == 0, 1.0, scale)  # all zero, or below what float32 can divide by
    part.scales.copy_(scale)
    levels = (blocks / scale[:, None]).round_().clamp_(-form.top, form.top).view(-1)
    _pack(levels[: part.codes.numel() * 8 // form.bits], form, part.codes)


def _read(part: _Part, form: BlockFormat, numel: int) -> Tensor:
    """Return the first `numel` float32 values of one chunk, in memory of their own."""
    blocks = _in_blocks(_unpack(part.codes, form), form.block)
    blocks *= part.scales[:, None]
    return blocks.view(-1)[:numel]


def _chunks(numel: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, numel, _CHUNK):
        yield begin, min(begin + _CHUNK, numel)


def _in_blocks(values: Tensor, block: int) -> Tensor:
    """Return the values as rows of `block` elements, with zeros appended."""
    padded = pad(values, (0, -values.numel() % block))
    return padded.view(padded.numel() // block, block)


def _pack(levels: Tensor, form: BlockFormat, out: Tensor) -> None:
    """Write whole numbers from -top to top to the bytes `out`; both signs are stored."""
    packed = (levels + (form.top + 1)).to(torch.uint8)
    if form.bits == 4:
        packed = packed[0::2] | packed[1::2] << 4
    out.copy_(packed)


def _unpack(packed: Tensor, form: BlockFormat) -> Tensor:
    if form.bits == 4:
        packed = torch.stack((packed & 15, packed >> 4), dim=1).view(-1)
    return packed.to(torch.float32) - (form.top + 1)
