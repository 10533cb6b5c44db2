"""Triton kernels that encode and decode ranges in one pass, with the bits of torch's operations."""

# A program encodes whole blocks. No multiplication is fused with an addition: ranks must decode the
# same bytes to the same bits whether they have Triton or not. Arguments of kernels have no
# annotations, since Triton reads them as its own.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paro.quantization.formats import ERROR_FORM, BlockFormat, padded

_LEAST = 1024  # elements of a program
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 x 2^23: to add and subtract it rounds to whole numbers

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
    has_nan = tl.max((blocks != blocks).to(tl.int32), 1)  # which the other maximum passes over
    scale = tl.where(has_nan != 0, float("nan"), scale)
    levels = (tl.div_rn(blocks, scale[:, None]) + _ROUNDER) - _ROUNDER
    levels = tl.minimum(tl.maximum(levels, -TOP * 1.0), TOP * 1.0)
    return levels, scale


@triton.jit
def _store(
    levels, scale, codes, scales, program, num_codes, num_blocks,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    packed = tl.reshape(levels + (1 << (BITS - 1)), (SIZE,)).to(tl.uint8)
    if BITS == 4:
        low, high = tl.split(tl.reshape(packed, (SIZE // 2, 2)))
        at = program * (SIZE // 2) + tl.arange(0, SIZE // 2)
        tl.store(codes + at, low | (high << 4), mask=at < num_codes // 2)
    else:
        at = program * SIZE + tl.arange(0, SIZE)
        tl.store(codes + at, packed, mask=at < num_codes)
    block = program * (SIZE // BLOCK) + tl.arange(0, SIZE // BLOCK)
    tl.store(scales + block, scale, mask=block < num_blocks)


@triton.jit
def _load(
    codes, scales, program, num_codes, num_blocks,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    if BITS == 4:
        at = program * (SIZE // 2) + tl.arange(0, SIZE // 2)
        packed = tl.load(codes + at, mask=at < num_codes // 2, other=0x88)  # the codes of 0
        levels = tl.reshape(tl.join(packed & 15, packed >> 4), (SIZE,)).to(tl.float32)
    else:
        at = program * SIZE + tl.arange(0, SIZE)
        levels = tl.load(codes + at, mask=at < num_codes, other=0x80).to(tl.float32)
    block = program * (SIZE // BLOCK) + tl.arange(0, SIZE // BLOCK)
    scale = tl.load(scales + block, mask=block < num_blocks, other=0.0)
    levels = tl.reshape(levels - (1 << (BITS - 1)), (SIZE // BLOCK, BLOCK))
    return tl.reshape(levels * scale[:, None], (SIZE,))


@triton.jit
def _encode(
    values, minus, codes, scales, error_codes, error_scales, numel, num_codes, num_blocks,
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
            error_codes, error_scales, program, num_codes, num_error_blocks, SIZE, 128, 8
        )
        x += earlier
    levels, scale = _levels(x, SIZE, BLOCK, (1 << (BITS - 1)) - 1)
    _store(levels, scale, codes, scales, program, num_codes, num_blocks, SIZE, BLOCK, BITS)
    if FEEDS_BACK:
        lost = x - tl.reshape(levels * scale[:, None], (SIZE,))
        error = earlier + weight * (lost - earlier)
        levels, scale = _levels(error, SIZE, 128, 127)
        _store(
            levels, scale, error_codes, error_scales, program, num_codes, num_error_blocks, SIZE,
            128, 8,
        )  # fmt: skip


@triton.jit
def _decode(
    codes, scales, out, numel, num_codes, num_blocks,
    ADDS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    x = _load(codes, scales, program, num_codes, num_blocks, SIZE, BLOCK, BITS)
    at = program * SIZE + tl.arange(0, SIZE)
    if ADDS:
        x = tl.load(out + at, mask=at < numel, other=0.0).to(tl.float32) + x
    tl.store(out + at, x, mask=at < numel)


def encode(
    values: Tensor,
    form: BlockFormat,
    out: Tensor,
    *,
    minus: Tensor | None = None,
    transforms: bool = False,
    error: Tensor | None = None,
    weight: float = 0.0,
) -> None:
    """As in blocks.py; `weight` is that of what was lost now, in the average `error`."""
    numel, size = values.numel(), _program_size(form)
    if numel == 0:
        return
    scales, codes = _parts(out, form, numel)
    error_scales, error_codes = scales, codes
    if error is not None:
        error_scales, error_codes = _parts(error, ERROR_FORM, padded(numel))
    _encode[(triton.cdiv(numel, size),)](
        values,
        values if minus is None else minus,
        codes,
        scales,
        error_codes,
        error_scales,
        numel,
        padded(numel),
        form.num_blocks(numel),
        ERROR_FORM.num_blocks(padded(numel)),
        weight,
        SUBTRACTS=minus is not None,
        TRANSFORMS=transforms,
        FEEDS_BACK=error is not None,
        BITS=form.bits,
        BLOCK=form.block,
        SIZE=size,
        enable_fp_fusion=False,
    )


def decode(encoded: Tensor, form: BlockFormat, out: Tensor, *, adds: bool) -> None:
    """As in blocks.py."""
    numel, size = out.numel(), _program_size(form)
    if numel == 0:
        return
    scales, codes = _parts(encoded, form, numel)
    _decode[(triton.cdiv(numel, size),)](
        codes,
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


def _parts(encoded: Tensor, form: BlockFormat, numel: int) -> tuple[Tensor, Tensor]:
    cut = form.scale_bytes(numel)
    return encoded[:cut].view(torch.float32), encoded[cut:]
