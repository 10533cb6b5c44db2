"""Triton kernels that quantize and dequantize ranges in one pass, bitwise as torch's operations."""

# A program quantizes entire blocks. No multiplication is fused with an addition: ranks with and
# without Triton must dequantize equal bytes to equal bits. The kernels' arguments have no
# annotations, since Triton would interpret them.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paro.quantization.formats import ERROR_FORM, ERROR_WEIGHT, BlockFormat, padded

_LEAST = 1024  # smallest number of elements per program
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 x 2^23: adding and subtracting it rounds to integers

VERSION: str = triton.__version__


@triton.jit
def _hadamard(x, SIZE: tl.constexpr):
    for step in tl.static_range(5):
        pairs = tl.reshape(x, (SIZE >> (step + 1), 2, 1 << step))
        low, high = tl.split(tl.permute(pairs, (0, 2, 1)))
        x = tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 2, 1)), (SIZE,))
    return x


@triton.jit
def _levels(x, SIZE: tl.constexpr, BLOCK: tl.constexpr, TOP: tl.constexpr):
    blocks = tl.reshape(x, (SIZE // BLOCK, BLOCK))
    scale = tl.div_rn(tl.max(tl.abs(blocks), 1), TOP * 1.0)
    scale = tl.where(scale == 0.0, 1.0, scale)
    has_nan = tl.max((blocks != blocks).to(tl.int32), 1)  # tl.max of values ignores NaN
    scale = tl.where(has_nan != 0, float("nan"), scale)
    levels = (tl.div_rn(blocks, scale[:, None]) + _ROUNDER) - _ROUNDER
    levels = tl.minimum(tl.maximum(levels, -TOP * 1.0), TOP * 1.0)
    return levels, scale


@triton.jit
def _store(
    levels, scale, packed, scales, program, num_padded, num_blocks,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    offset = tl.reshape(levels + (1 << (BITS - 1)), (SIZE,)).to(tl.uint8)
    if BITS == 4:
        low, high = tl.split(tl.reshape(offset, (SIZE // 2, 2)))
        at = program * (SIZE // 2) + tl.arange(0, SIZE // 2)
        tl.store(packed + at, low | (high << 4), mask=at < num_padded // 2)
    else:
        at = program * SIZE + tl.arange(0, SIZE)
        tl.store(packed + at, offset, mask=at < num_padded)
    block = program * (SIZE // BLOCK) + tl.arange(0, SIZE // BLOCK)
    tl.store(scales + block, scale, mask=block < num_blocks)


@triton.jit
def _load(
    packed, scales, program, num_padded, num_blocks,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    if BITS == 4:
        at = program * (SIZE // 2) + tl.arange(0, SIZE // 2)
        pairs = tl.load(packed + at, mask=at < num_padded // 2, other=0x88)  # zeros
        levels = tl.reshape(tl.join(pairs & 15, pairs >> 4), (SIZE,)).to(tl.float32)
    else:
        at = program * SIZE + tl.arange(0, SIZE)
        levels = tl.load(packed + at, mask=at < num_padded, other=0x80).to(tl.float32)
    block = program * (SIZE // BLOCK) + tl.arange(0, SIZE // BLOCK)
    scale = tl.load(scales + block, mask=block < num_blocks, other=0.0)
    levels = tl.reshape(levels - (1 << (BITS - 1)), (SIZE // BLOCK, BLOCK))
    return tl.reshape(levels * scale[:, None], (SIZE,))


@triton.jit
def _quantize(
    values, minus, packed, scales, error_packed, error_scales, numel, num_padded, num_blocks,
    num_error_blocks, weight, SUBTRACTS: tl.constexpr, TRANSFORMS: tl.constexpr,
    FEEDS_BACK: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    at = program * SIZE + tl.arange(0, SIZE)
    x = tl.load(values + at, mask=at < numel, other=0.0).to(tl.float32)
    if SUBTRACTS:
        x -= tl.load(minus + at, mask=at < numel, other=0.0).to(tl.float32)
    if TRANSFORMS:
        x = _hadamard(x, SIZE)
    if FEEDS_BACK:
        earlier = _load(
            error_packed, error_scales, program, num_padded, num_error_blocks, SIZE, 128, 8
        )
        x += earlier
    levels, scale = _levels(x, SIZE, BLOCK, (1 << (BITS - 1)) - 1)
    _store(levels, scale, packed, scales, program, num_padded, num_blocks, SIZE, BLOCK, BITS)
    if FEEDS_BACK:
        lost = x - tl.reshape(levels * scale[:, None], (SIZE,))
        error = earlier + weight * (lost - earlier)
        levels, scale = _levels(error, SIZE, 128, 127)
        _store(
            levels, scale, error_packed, error_scales, program, num_padded, num_error_blocks, SIZE,
            128, 8,
        )  # fmt: skip


@triton.jit
def _dequantize(
    packed, scales, out, numel, num_padded, num_blocks,
    ADDS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    x = _load(packed, scales, program, num_padded, num_blocks, SIZE, BLOCK, BITS)
    at = program * SIZE + tl.arange(0, SIZE)
    if ADDS:
        x = tl.load(out + at, mask=at < numel, other=0.0).to(tl.float32) + x
    tl.store(out + at, x, mask=at < numel)


def quantize(
    values: Tensor,
    form: BlockFormat,
    out: Tensor,
    *,
    minus: Tensor | None = None,
    transforms: bool = False,
    error: Tensor | None = None,
) -> None:
    """Quantize as `quantize_by_torch` does."""
    numel, size = values.numel(), _program_size(form)
    if numel == 0:
        return
    scales, packed = _parts(out, form, numel)
    error_scales, error_packed = scales, packed
    if error is not None:
        error_scales, error_packed = _parts(error, ERROR_FORM, padded(numel))
    _quantize[(triton.cdiv(numel, size),)](
        values,
        values if minus is None else minus,
        packed,
        scales,
        error_packed,
        error_scales,
        numel,
        padded(numel),
        form.num_blocks(numel),
        ERROR_FORM.num_blocks(padded(numel)),
        ERROR_WEIGHT,
        SUBTRACTS=minus is not None,
        TRANSFORMS=transforms,
        FEEDS_BACK=error is not None,
        BITS=form.bits,
        BLOCK=form.block,
        SIZE=size,
        enable_fp_fusion=False,
    )


def dequantize(quantized: Tensor, form: BlockFormat, out: Tensor, *, adds: bool = False) -> None:
    """Dequantize as `dequantize_by_torch` does."""
    numel, size = out.numel(), _program_size(form)
    if numel == 0:
        return
    scales, packed = _parts(quantized, form, numel)
    _dequantize[(triton.cdiv(numel, size),)](
        packed,
        scales,
        out,
        numel,
        padded(numel),
        form.num_blocks(numel),
        ADDS=adds,
        BITS=form.bits,
        BLOCK=form.block,
        SIZE=size,
        enable_fp_fusion=False,
    )


def _program_size(form: BlockFormat) -> int:
    return max(form.block, _LEAST)


def _parts(quantized: Tensor, form: BlockFormat, numel: int) -> tuple[Tensor, Tensor]:
    cut = form.scale_bytes(numel)
    return quantized[:cut].view(torch.float32), quantized[cut:]
