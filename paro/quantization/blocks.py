"""Symmetric quantization of float32 ranges to 4 or 8 bits, with a scale for each block."""

# Only element-wise operations and maxima are used: equal values give equal quantized values on
# every rank, for any number of threads. Values must be finite; callers check them before.
# Temporary tensors have at most `_CHUNK` elements.

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from paro.quantization.formats import (
    ERROR_FORM,
    ERROR_WEIGHT,
    PAD,
    BlockFormat,
    RangeFormat,
    padded,
)

DEVICES = {"cuda"}  # device types with Triton; tests add "cpu" for Triton's interpreter

_CHUNK = 1 << 20  # elements quantized at a time; a multiple of every block


def split_range(
    payload: Tensor, ranges: RangeFormat, start: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return views of the range at `start`: quantized bytes, and exact elements of `dtype`."""
    assert dtype.itemsize == ranges.exact_bytes, f"{dtype} is not of {ranges.exact_bytes} bytes"
    num_quantized = ranges.num_quantized(start)
    cut = ranges.form.num_bytes(num_quantized)
    stop = cut + (ranges.numel - num_quantized) * dtype.itemsize
    return payload[:cut], payload[cut:stop].view(dtype)


def quantize_by_torch(
    values: Tensor,
    form: BlockFormat,
    out: Tensor,
    *,
    minus: Tensor | None = None,
    transforms: bool = False,
    error: Tensor | None = None,
) -> None:
    """Quantize `values` - `minus`, 1-D tensors, into the bytes `out`.

    With `transforms` Hadamard transforms of the values are quantized. With `error`, which has
    `error_bytes(values.numel())` bytes, at first 0, X = transforms + E is quantized; `error` holds
    the moving average of quantization errors in 8 bits, E <- 0.8 E + 0.2 (X - dequantized X), as in
    LoCo (arXiv 2407.04480) with the constants of DeepSpeed.
    """
    for begin in range(0, values.numel(), _CHUNK):
        end = min(begin + _CHUNK, values.numel())
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
        # lerp_ would fuse the multiplication with the addition on some devices.
        _write(earlier.add_((chunk - earlier).mul_(ERROR_WEIGHT)), ERROR_FORM, remembered)


def dequantize_by_torch(
    quantized: Tensor, form: BlockFormat, out: Tensor, *, adds: bool = False
) -> None:
    """Dequantize bytes into the 1-D `out`, or add the dequantized values to it in float32."""
    for begin in range(0, out.numel(), _CHUNK):
        end = min(begin + _CHUNK, out.numel())
        part = _part(quantized, form, out.numel(), begin, end)
        values, target = _read(part, form, end - begin), out[begin:end]
        target.copy_(target.float() + values if adds else values)


def hadamard(values: Tensor) -> Tensor:
    """Return the Hadamard transforms of every 32 elements of a float32 tensor, padded with zeros.

    The transform is not normalized: applied twice it gives 32 times the values. A single large
    value, which alone would set the scale of its block, is spread over 32 elements.
    """
    spread = _in_blocks(values, PAD)
    half = 1
    while half < PAD:  # butterflies: sums of two values, in a fixed order
        pairs = spread.view(spread.numel() // PAD, PAD // (2 * half), 2, half)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        spread = torch.stack((low + high, low - high), dim=2)
        half *= 2
    return spread.view(-1)


_Part = tuple[Tensor, Tensor]  # scales and packed quantized values of a chunk


def _part(quantized: Tensor, form: BlockFormat, numel: int, begin: int, end: int) -> _Part:
    """Return views of a range's part for a chunk: elements [begin, end) of the range's `numel`."""
    assert quantized.numel() == form.num_bytes(numel), f"{quantized.numel()} for {numel} elements"
    cut, first = form.scale_bytes(numel), begin // form.block
    scales = quantized[:cut].view(torch.float32)[first : first + form.num_blocks(end - begin)]
    start, length = cut + begin * form.bits // 8, padded(end - begin) * form.bits // 8
    return scales, quantized[start : start + length]


def _write(values: Tensor, form: BlockFormat, part: _Part) -> None:
    """Quantize a chunk of float32 values; the last block is stored without its unused rest."""
    blocks = _in_blocks(values, form.block)
    largest = blocks.abs().amax(1)
    # Divide by a tensor: on a GPU torch divides by a number as a product with the reciprocal.
    scale = largest / torch.full_like(largest, form.top)
    scale = torch.where(scale == 0, 1.0, scale)  # a block of zeros or tiny values
    scales_out, packed_out = part
    scales_out.copy_(scale)
    levels = (blocks / scale[:, None]).round_().clamp_(-form.top, form.top).view(-1)
    packed = (levels[: packed_out.numel() * 8 // form.bits] + (form.top + 1)).to(torch.uint8)
    if form.bits == 4:
        packed = packed[0::2] | packed[1::2] << 4
    packed_out.copy_(packed)


def _read(part: _Part, form: BlockFormat, numel: int) -> Tensor:
    """Return the first `numel` float32 values of one chunk, in new memory."""
    scales, packed = part
    if form.bits == 4:
        packed = torch.stack((packed & 15, packed >> 4), dim=1).view(-1)
    blocks = _in_blocks(packed.to(torch.float32) - (form.top + 1), form.block)
    blocks *= scales[:, None]
    return blocks.view(-1)[:numel]


def _in_blocks(values: Tensor, block: int) -> Tensor:
    """Return the values as rows of `block` elements, with zeros appended."""
    padded = pad(values, (0, -values.numel() % block))
    return padded.view(padded.numel() // block, block)


class BlockKernels(NamedTuple):
    """Implementations of quantization and dequantization, and a log line about the choice."""

    quantize: Callable[..., None]
    dequantize: Callable[..., None]
    line: str = ""  # empty: there is no choice


BY_TORCH = BlockKernels(quantize_by_torch, dequantize_by_torch)


@cache
def choose_kernels(device: torch.device) -> BlockKernels:
    """Return Triton kernels on a GPU where they equal torch's operations bitwise, else the latter.

    Ranks with and without kernels then compute equal parameters.
    """
    if device.type not in DEVICES:
        return BY_TORCH
    try:
        from paro.quantization.kernels import VERSION, dequantize, quantize

        kernels = BlockKernels(quantize, dequantize, f"codes: Triton {VERSION}")
        _compare(kernels, device)
    except Exception as error:  # any exception of Triton, the compiler or the device's driver
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return BY_TORCH._replace(line=f"codes: torch's operations, because Triton fails: {reason}")
    return kernels


def _compare(kernels: BlockKernels, device: torch.device) -> None:
    """Raise `RuntimeError` unless kernels are bitwise equal to torch's operations."""
    numel = 5000
    values = torch.linspace(-40.0, 40.0, numel, device=device).sin_()
    # The interpreter does not round to bf16.
    kind = torch.float32 if device.type == "cpu" else torch.bfloat16
    for form in (BlockFormat(bits=4, block=128), BlockFormat(bits=8, block=2048)):
        results = []
        for run, undo, _ in (BY_TORCH, kernels):
            quantized = torch.zeros(form.num_bytes(numel), dtype=torch.uint8, device=device)
            params = torch.ones(numel, dtype=kind, device=device)
            run(values, form, quantized, minus=params, transforms=form.bits == 4)
            undo(quantized, form, params, adds=True)
            results.append((quantized, params))
        if not all(map(torch.equal, *results)):
            raise RuntimeError("results differ from those of torch's operations")
