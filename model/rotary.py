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
    if config.position_embedding_type == "yarn":
        keep = _share_that_yarn_keeps(config)
        factor = config.yarn_rotary_scaling_factor
        frequencies = keep * frequencies + (1.0 - keep) * frequencies / factor
    # Dividing frequencies equals dividing positions.
    return frequencies / config.rotary_seq_len_interpolation_factor


def _share_that_yarn_keeps(config: LlamaConfig) -> Tensor:
    """Return by how much YaRN keeps the frequency of each pair of channels: 1 wholly, 0 not, [H/2].

    Frequencies with more than `yarn_beta_fast` turns over the original context are kept, those with
    fewer than `yarn_beta_slow` divided (arXiv 2309.00071). The share is linear in the pair between.
    """
    original, head = config.yarn_original_max_position_embeddings, config.kv_channels
    first, last = (
        head * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.rotary_base))
        for turns in (config.yarn_beta_fast, config.yarn_beta_slow)
    )
    if config.yarn_correction_range_round_to_int:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head - 1)
    pairs = torch.arange(head // 2, dtype=torch.float32, device="cpu")
    return 1.0 - ((pairs - first) / (last - first or 0.001)).clamp(0.0, 1.0)


@lru_cache(maxsize=8)
def rotations(
    config: LlamaConfig, seq_length: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Compute (cos, cos) [S, 1, H] and sin [S, 1, H / 2] of all positions, and cache them.

    Both are multiplied by the config's `rotary_scale`.
    """
    positions = torch.arange(seq_length, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, inverse_frequencies(config))[:, None, :]
    cos, sin = ((x * config.rotary_scale).to(device, dtype) for x in (angles.cos(), angles.sin()))
    return torch.cat((cos, cos), dim=-1), sin


class _Rotate(torch.autograd.Function):
    """A rotation whose backward applies the inverse, so that the input is not saved."""

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
    return _Rotate.apply(x_BSNH, cos, sin, fused, for_cast)


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
