"""The settings of YaRN that are refused, and the scale of queries and keys that they make."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paro.errors import UserError, check_between, contradiction

if TYPE_CHECKING:  # which checks itself by this
    from model.config import LlamaConfig

_YARN = "--position-embedding-type yarn"
_TURNS = 1e-9, 10**9  # limits of turns over a context, far from what overflows


def check_yarn(config: LlamaConfig) -> None:
    """Raise `UserError` for settings from which no rotation can be computed."""
    check_between(1, 1e30, yarn_rotary_scaling_factor=config.yarn_rotary_scaling_factor)
    check_between(*_TURNS, yarn_beta_fast=config.yarn_beta_fast)
    check_between(*_TURNS, yarn_beta_slow=config.yarn_beta_slow)
    if not config.yarn_beta_slow < config.yarn_beta_fast:
        raise UserError(
            f"--yarn-beta-slow {config.yarn_beta_slow} must be below --yarn-beta-fast "
            f"{config.yarn_beta_fast}"
        )
    for flag, weight in (
        ("--yarn-mscale", config.yarn_mscale),
        ("--yarn-mscale-all-dim", config.yarn_mscale_all_dim),
    ):
        scale = _scale(config, weight or 0.0)
        if not 0.0 < scale < math.inf:
            raise UserError(f"{flag} {weight} makes a scale of {scale:g}, not a positive one")
    if config.position_embedding_type != "yarn":
        return
    factor = config.rotary_seq_len_interpolation_factor
    for other, is_given in (
        ("--use-rope-scaling", config.use_rope_scaling),
        (f"--rotary-seq-len-interpolation-factor {factor}", factor != 1.0),
    ):
        if is_given:
            raise contradiction(_YARN, other, "both stretch positions")
    if not config.rotary_base > 1.0:
        raise UserError(f"--rotary-base {config.rotary_base} must be above 1 with {_YARN}")


def yarn_scale(config: LlamaConfig) -> float:
    """Return the factor on rotated queries and keys."""
    over, under = config.yarn_mscale, config.yarn_mscale_all_dim
    if over is None or under is None:
        return _scale(config, 1.0)
    return _scale(config, over) / _scale(config, under)


def _scale(config: LlamaConfig, weight: float) -> float:
    return weight * (0.1 * math.log(config.yarn_rotary_scaling_factor)) + 1.0
