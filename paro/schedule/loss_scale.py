"""Constant and dynamic loss scaling, which keeps fp16 gradients in range."""

# Dynamic scaling is Megatron's: the scale doubles after `loss_scale_window` finite steps in a row.
# Each non-finite step decrements a counter that starts at `hysteresis` and, once the counter is 0
# or less, halves the scale, down to `min_loss_scale`. Only a doubling resets the counter.

from __future__ import annotations

from dataclasses import dataclass

from paro.errors import UserError, check_least, check_positive

GROWTH = 2.0
BACKOFF = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaleConfig:
    """Megatron's flags of loss scaling; `dynamic`: fp16 without a constant --loss-scale."""

    dynamic: bool = False
    loss_scale: float | None = None
    initial_loss_scale: float = 2.0**32
    min_loss_scale: float = 1.0
    loss_scale_window: int = 1000
    hysteresis: int = 2

    def __post_init__(self) -> None:
        assert not (self.dynamic and self.loss_scale), f"{self.loss_scale} is a constant scale"
        least, first = self.min_loss_scale, self.initial_loss_scale
        check_positive(loss_scale=self.loss_scale, min_loss_scale=least, initial_loss_scale=first)
        if least > first:
            raise UserError(f"--min-loss-scale {least} is above --initial-loss-scale {first}")
        check_least(1, loss_scale_window=self.loss_scale_window, hysteresis=self.hysteresis)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaleState:
    """The loss-scaling state saved in checkpoints."""

    scale: float
    growth_tracker: int
    hysteresis_tracker: int


def start_loss_scale(config: LossScaleConfig) -> LossScaleState:
    """Return the state before the first step; without fp16 or --loss-scale the scale is 1."""
    scale = config.initial_loss_scale if config.dynamic else config.loss_scale or 1.0
    return LossScaleState(scale=scale, growth_tracker=0, hysteresis_tracker=config.hysteresis)


def update_loss_scale(
    config: LossScaleConfig, state: LossScaleState, *, found_nonfinite: bool
) -> LossScaleState:
    """Return the state after a step; `found_nonfinite`: a gradient of the step was not finite."""
    if not config.dynamic:
        return state
    scale, growth, hysteresis = state.scale, state.growth_tracker, state.hysteresis_tracker
    if found_nonfinite:
        growth = 0
        hysteresis -= 1
        if hysteresis <= 0:
            scale = max(scale * BACKOFF, config.min_loss_scale)
    else:
        growth += 1
        if growth == config.loss_scale_window:
            growth = 0
            hysteresis = config.hysteresis
            scale *= GROWTH
    return LossScaleState(scale=scale, growth_tracker=growth, hysteresis_tracker=hysteresis)
