"""Rotary position embedding in Hugging Face's half-rotation form, plain or scaled."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from model.config import LlamaConfig


def inverse_frequencies(config: LlamaConfig) -> Tensor:
    """Compute radians per position of each pair of channels, fp32 on the CPU, [H / 2]."""
    exponents = torch.arange(0, config.kv_channels, 2, dtype=torch.float32, device="cpu")
    frequencies = 1.0 / config.rotary_base ** (exponents / config.kv_channels)
    if config.use_rope_scaling:
        # LLaMA-3.1: frequencies with fewer than `low` turns over the original context are divided
        # by `factor`, those with more than `high` turns are kept, those in between interpolated.
        low, high = config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor
        original = config.rope_scaling_original_max_position_embeddings
        turns = original * frequencies / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        factor = config.rope_scaling_factor
        frequencies = keep * frequencies + (1.0 - keep) * frequencies / factor
    # Dividing frequencies equals dividing positions.
    return frequencies / config.rotary_seq_len_interpolation_factor


@lru_cache(maxsize=8)
def rotations(
    config: LlamaConfig, seq_length: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Compute (cos, cos) [S, 1, H] and sin [S, 1, H / 2] of all positions, and cache them."""
    positions = torch.arange(seq_length, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, inverse_frequencies(config))[:, None, :]
    cos, sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
    return torch.cat((cos, cos), dim=-1), sin


class _Rotate(torch.autograd.Function):
    """Backward applies the inverse rotation, so the input is not saved."""

    @staticmethod
    def forward(
        ctx: Any, x_BSNH: Tensor, cos: Tensor, sin: Tensor, fused: bool, for_cast: bool
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.options = {"fused": fused, "for_cast": for_cast}
        return _rotated(x_BSNH, cos, sin, inverse=False, fused=fused, for_cast=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_BSNH = _rotated(grads[0], *ctx.saved_tensors, inverse=True, **ctx.options)
        return grad_BSNH, None, None, None, None


def rotate(
    x_BSNH: Tensor, cos: Tensor, sin: Tensor, *, fused: bool = False, for_cast: bool = False
) -> Tensor:
    """Rotate each pair of channels (i, i + H/2) by its position's angle; `fused`: by Triton.

    `for_cast`: Triton also finds the gradient's amax for the next cast to fp8.
    """
    if torch.compiler.is_compiling():  # inductor fuses this; torch 2.11 loses `out=` of views
        first, second = x_BSNH.chunk(2, dim=-1)
        cos = cos.chunk(2, dim=-1)[0]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    out: Tensor = _Rotate.apply(x_BSNH, cos, sin, fused, for_cast)
    return out


def _rotated(
    x_BSNH: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool, fused: bool, for_cast: bool
) -> Tensor:
    if fused:
        from model.kernels import rotate as by_triton

        return by_triton(x_BSNH, cos, sin, inverse=inverse, for_cast=for_cast)
    if inverse:
        sin = -sin
    out = torch.empty_like(x_BSNH, memory_format=torch.contiguous_format)
    torch.mul(x_BSNH, cos, out=out)
    first, second = x_BSNH.chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    out_first.addcmul_(second, sin, value=-1.0)
    out_second.addcmul_(first, sin)
    return out
