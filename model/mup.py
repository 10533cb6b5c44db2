"""The settings of muP that are refused, and its factors of width, logits, and queries and keys."""

# Maximal update parametrization (arXiv 2203.03466) as Megatron has it: a model of `width` times the
# hidden size of the base takes the base's learning rate, with
#
#     matrices of blocks   initial std / sqrt(width), learning rate and AdamW's epsilon / width
#     attention's scores   sqrt(base head size) / head size, for 1 / sqrt(head size)
#     logits               / width
#
# The embedding and the output layer keep the initial std, and they and norms the learning rate.

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paro.errors import check_between

if TYPE_CHECKING:  # which checks itself by this
    from model.config import LlamaConfig

_FACTORS = 1e-9, 1e9  # limits of factors, far from what overflows


def check_mup(config: LlamaConfig) -> None:
    """Raise `UserError` for settings from which no factor can be computed."""
    check_between(1, 2**20, mup_base_hidden_size=config.mup_base_hidden_size)
    check_between(
        *_FACTORS,
        mup_embedding_mult=config.mup_embedding_mult,
        mup_output_mult=config.mup_output_mult,
        mup_base_head_dim=config.mup_base_head_dim,
    )
    check_between(0, 8, mup_attn_scale_power=config.mup_attn_scale_power)


def width_of(config: LlamaConfig) -> float:
    """Return the hidden size as a multiple of the base model's; 1 without muP."""
    base = config.mup_base_hidden_size if config.use_mup else None
    return 1.0 if base is None else config.hidden_size / base


def embedding_scale(config: LlamaConfig) -> float:
    """Return the factor on the embedding's output."""
    return config.mup_embedding_mult if config.use_mup else 1.0


def logit_scale(config: LlamaConfig) -> float:
    """Return the factor on logits: by default 1 / the width."""
    factor = config.mup_output_mult if config.use_mup else 1.0
    return 1.0 / width_of(config) if factor == 1.0 else factor


def query_key_scale(config: LlamaConfig) -> float:
    """Return the factor on queries and on keys that makes the scale of attention's scores."""
    if not config.use_mup:
        return 1.0
    base = 1.0 if config.mup_base_head_dim is None else math.sqrt(config.mup_base_head_dim)
    scale = base / config.kv_channels**config.mup_attn_scale_power
    return math.sqrt(scale * math.sqrt(config.kv_channels))
