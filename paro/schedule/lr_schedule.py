"""Learning-rate and weight-decay schedules as functions of the samples of applied steps."""

# The rules are Megatron's. All lengths are in samples: a batch-size ramp-up does not distort the
# schedules. Both functions take the samples of applied steps: a step that was skipped, for a
# non-finite gradient or a spike, does not advance the schedule. Groups that train alone (outer
# steps) count the samples of every step, so that all groups have one learning rate.

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from paro.errors import UserError, check_positive

# Decay style: f(ratio) = the fraction of lr - min_lr that remains at `ratio` of the decay, 0 to 1.
_REMAINING: dict[str, Callable[[float], float]] = {
    "linear": lambda ratio: 1.0 - ratio,
    "cosine": lambda ratio: 0.5 * (math.cos(math.pi * ratio) + 1.0),
}
# The fraction that remains in the tail of WSD: an "exponential" tail is a curve of WSD's own.
_REMAINING_IN_TAIL: dict[str, Callable[[float], float]] = {
    "exponential": lambda ratio: 2.0 * 0.5**ratio - 1.0,
    "linear": _REMAINING["linear"],
    "cosine": _REMAINING["cosine"],
    "minus_sqrt": lambda ratio: 1.0 - math.sqrt(ratio),
}

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_DECAY_STYLES = tuple(_REMAINING_IN_TAIL)
WEIGHT_DECAY_STYLES = ("constant", "linear", "cosine")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Learning-rate and weight-decay schedules, with Megatron's names; lengths are in samples."""

    lr: float
    min_lr: float = 0.0
    decoupled_lr: float | None = None  # rate of embedding and output layer; None: as all others
    decoupled_min_lr: float | None = None  # None: `min_lr`
    lr_decay_style: str = "linear"
    lr_decay_samples: int
    lr_warmup_samples: float = 0  # length of the warm-up; fractional under --lr-warmup-fraction
    lr_warmup_init: float = 0.0
    lr_wsd_decay_style: str = "exponential"
    lr_wsd_decay_samples: int | None = None
    start_weight_decay: float = 0.01
    end_weight_decay: float = 0.01
    weight_decay_incr_style: str = "constant"
    weight_decay_incr_samples: int = 1

    def __post_init__(self) -> None:
        check_positive(lr=self.lr, decoupled_lr=self.decoupled_lr)
        for flag, rate in (("--min-lr", self.min_lr), ("--lr-warmup-init", self.lr_warmup_init)):
            if not 0.0 <= rate <= self.lr:
                raise UserError(f"{flag} {rate} must be between 0 and --lr {self.lr}")
        if self.decoupled_min_lr is not None and self.decoupled_lr is None:
            raise UserError(f"--decoupled-min-lr {self.decoupled_min_lr} needs --decoupled-lr")
        decoupled_lr, least = self._decoupled
        if not 0.0 <= least <= decoupled_lr:
            raise UserError(
                f"--decoupled-min-lr {least} (by default --min-lr) must be between 0 and "
                f"--decoupled-lr {decoupled_lr}"
            )
        if self.lr_decay_samples <= 0:
            raise UserError(
                f"the learning rate decays over {self.lr_decay_samples} samples: give "
                "--lr-decay-iters or --lr-decay-samples above 0"
            )
        if not 0 <= self.lr_warmup_samples < self.lr_decay_samples:
            raise UserError(
                f"the warm-up takes {self.lr_warmup_samples:g} samples and must be shorter than "
                f"the decay of {self.lr_decay_samples}: lower --lr-warmup-iters, "
                "--lr-warmup-samples or --lr-warmup-fraction, or train longer"
            )
        tail = self.lr_wsd_decay_samples
        if self.lr_decay_style == "WSD" and tail is None:
            raise UserError(
                "--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples"
            )
        if self.lr_decay_style == "WSD" and not 0 < (tail or 0) <= self.lr_decay_samples:
            raise UserError(
                f"the WSD tail of {tail} samples must be within the decay of "
                f"{self.lr_decay_samples}: change --lr-wsd-decay-iters or -samples"
            )
        if not 0.0 <= self.start_weight_decay <= self.end_weight_decay:
            raise UserError(
                f"weight decay goes from {self.start_weight_decay} to {self.end_weight_decay}: "
                "--weight-decay must be at least 0, and --start-weight-decay not above "
                "--end-weight-decay"
            )

    @property
    def _decoupled(self) -> tuple[float, float]:
        """The highest and the lowest learning rate of embedding and output layer."""
        lr, least = self.decoupled_lr, self.decoupled_min_lr
        return self.lr if lr is None else lr, self.min_lr if least is None else least

    def lr_at(self, samples: int) -> float:
        """Return the learning rate after applied steps of `samples` samples in all."""
        return self._rate_at(samples, self.lr, self.min_lr)

    def decoupled_lr_at(self, samples: int) -> float | None:
        """Return the learning rate of embedding and output layer; None: it is not decoupled."""
        return None if self.decoupled_lr is None else self._rate_at(samples, *self._decoupled)

    def _rate_at(self, samples: int, highest: float, lowest: float) -> float:
        """Return the learning rate between two limits after `samples` samples in all."""
        if self.lr_warmup_samples > 0 and samples <= self.lr_warmup_samples:
            rise = (highest - self.lr_warmup_init) * samples / self.lr_warmup_samples
            return self.lr_warmup_init + rise
        if self.lr_decay_style == "constant":
            return highest
        if samples > self.lr_decay_samples:
            return lowest
        if self.lr_decay_style == "inverse-square-root":
            warmup = max(self.lr_warmup_samples, 1)
            return max(lowest, highest * math.sqrt(warmup) / math.sqrt(max(samples, 1)))
        if self.lr_decay_style == "WSD":  # the whole rate remains until the tail
            tail = self.lr_wsd_decay_samples
            assert tail is not None, "a WSD schedule has a tail"
            into_tail = max(0, samples - (self.lr_decay_samples - tail))
            left = _REMAINING_IN_TAIL[self.lr_wsd_decay_style](into_tail / tail)
        else:
            decay = self.lr_decay_samples - self.lr_warmup_samples
            left = _REMAINING[self.lr_decay_style]((samples - self.lr_warmup_samples) / decay)
        return lowest + left * (highest - lowest)

    def weight_decay_at(self, samples: int) -> float:
        """Return the weight decay after applied steps of `samples` samples in all."""
        if self.weight_decay_incr_style == "constant" or samples > self.weight_decay_incr_samples:
            return self.end_weight_decay
        left = _REMAINING[self.weight_decay_incr_style](samples / self.weight_decay_incr_samples)
        return self.end_weight_decay - left * (self.end_weight_decay - self.start_weight_decay)
