"""Checks that skip a step: no tokens, non-finite or spiky loss, non-finite or large gradients."""

# A step is compared with running means of the loss, the loss's variance and the gradient norm. The
# running means are part of a run's state, so that a resumed run decides the same. They include
# skipped steps with finite values: a loss that stays high becomes the new mean.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import fmean

from paro.errors import UserError, check_least, check_positive

EXIT_AFTER_SKIPPED = 20  # skipped steps in a row; a lasting spike becomes the mean after 2 or 3
_MEMORY = 50.0  # length of the running means, in steps (or rounds: EDiT, arXiv 2412.07210)
_WARMUP_STEPS = 100  # no check for spikes or large norms before this many finite steps
_DEVIATIONS = 6.0  # a spike is above the mean loss by this many standard deviations, and ...
_LEAST_RISE = 0.1  # ... by at least this fraction of the mean, as an outlier among movements is
_LARGE_NORM = 10.0  # a large gradient norm is above this multiple of its mean


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChecksConfig:
    """Megatron's step checks, and the number of skipped steps after which the run exits."""

    check_for_nan_in_loss_and_grad: bool = False
    check_for_spiky_loss: bool = False
    check_for_large_grads: bool = False
    exit_after_skipped_iterations: int = EXIT_AFTER_SKIPPED  # skipped in a row; 0: never exit
    # Standard deviations of a spike in loss or norm above the mean; None: the limits above.
    spike_deviations: float | None = None
    spikes_in_a_row: int = 0  # skipped steps after which a spike is trained on; 0: no limit
    iterations_to_skip: tuple[int, ...] = ()  # iterations whose samples are read and not used

    def __post_init__(self) -> None:
        limit = self.exit_after_skipped_iterations
        check_least(0, "never exits", exit_after_skipped_iterations=limit)
        check_least(0, "sets no limit", spikes_in_a_row=self.spikes_in_a_row)
        check_least(1, iterations_to_skip=min(self.iterations_to_skip, default=None))
        check_positive(spike_deviations=self.spike_deviations)
        if 0 < limit <= self.spikes_in_a_row:
            raise UserError(
                f"--spikes-in-a-row {self.spikes_in_a_row} must be below "
                f"--exit-after-skipped-iterations {limit}, which ends the run before"
            )
        if not (self.check_for_spiky_loss or self.check_for_large_grads):
            checks = "needs --check-for-spiky-loss or --check-for-large-grads"
            if self.spike_deviations is not None:
                raise UserError(f"--spike-deviations {checks}")
            if self.spikes_in_a_row:
                raise UserError(f"--spikes-in-a-row {checks}")


class StepVerdict(Enum):
    """The result of the checks of a step; the update is skipped unless it is FINE."""

    FINE = "fine"
    OVERFLOW = "fp16 overflow"  # non-finite gradients whose loss scale may fall; training goes on
    NOT_FINITE = "not finite"
    SPIKY_LOSS = "spiky loss"
    LARGE_GRADS = "large gradients"
    NO_TOKENS = "no answered token"
    ASKED = "--iterations-to-skip has it"


@dataclass(frozen=True, slots=True)
class Expectation:
    """Running statistics of the steps so far."""

    num_steps: int = 0  # number of steps with finite loss and gradients
    loss: float = 0.0
    loss_variance: float = 0.0
    grad_norm: float = 0.0
    grad_norm_variance: float = 0.0
    skipped_in_a_row: int = 0  # skipped steps since the last update, without fp16 overflows


def judge(
    config: StepChecksConfig,
    expected: Expectation,
    *,
    loss: float,
    grad_norm: float,
    scale_can_fall: bool,
    has_tokens: bool,
) -> StepVerdict:
    """Return the verdict on a step, from values that are equal on all ranks."""
    if not has_tokens:
        return StepVerdict.NO_TOKENS
    if not math.isfinite(loss):
        return StepVerdict.NOT_FINITE
    if not math.isfinite(grad_norm):
        return StepVerdict.OVERFLOW if scale_can_fall else StepVerdict.NOT_FINITE
    if expected.num_steps < _WARMUP_STEPS:
        return StepVerdict.FINE
    if config.spikes_in_a_row and expected.skipped_in_a_row >= config.spikes_in_a_row:
        return StepVerdict.FINE
    if config.check_for_spiky_loss and loss > most_loss(config, expected):
        return StepVerdict.SPIKY_LOSS
    if config.check_for_large_grads and grad_norm > most_grad_norm(config, expected):
        return StepVerdict.LARGE_GRADS
    return StepVerdict.FINE


def most_loss(config: StepChecksConfig, expected: Expectation) -> float:
    """Return the loss above which a step is skipped under --check-for-spiky-loss."""
    if config.spike_deviations is not None:
        return expected.loss + config.spike_deviations * math.sqrt(expected.loss_variance)
    return far_above(expected.loss, _DEVIATIONS, expected.loss_variance)


def most_grad_norm(config: StepChecksConfig, expected: Expectation) -> float:
    """Return the gradient norm above which a step is skipped under --check-for-large-grads."""
    if config.spike_deviations is None:
        return _LARGE_NORM * expected.grad_norm
    return expected.grad_norm + config.spike_deviations * math.sqrt(expected.grad_norm_variance)


def expect_after(
    expected: Expectation, verdict: StepVerdict, *, loss: float, grad_norm: float
) -> Expectation:
    """Return the running statistics after a step with this verdict."""
    if verdict in (StepVerdict.OVERFLOW, StepVerdict.ASKED):
        return expected
    in_a_row = 0 if verdict is StepVerdict.FINE else expected.skipped_in_a_row + 1
    if verdict in (StepVerdict.NOT_FINITE, StepVerdict.NO_TOKENS):
        return replace(expected, skipped_in_a_row=in_a_row)
    count = expected.num_steps + 1
    losses = moments_after([loss], count, expected.loss, expected.loss_variance)
    norms = moments_after([grad_norm], count, expected.grad_norm, expected.grad_norm_variance)
    return Expectation(count, *losses, *norms, in_a_row)


def moments_after(
    values: Sequence[float], count: int, mean: float, variance: float
) -> tuple[float, float]:
    """Return a running mean and variance after the values of step number `count`."""
    part = 1.0 / min(count, _MEMORY)  # a plain mean over the first steps
    step_mean = fmean(values)
    away, within = step_mean - mean, fmean((value - step_mean) ** 2 for value in values)
    # The variance of single values: of the step's mean, and within the step.
    return mean + part * away, (1.0 - part) * (variance + part * (away * away)) + part * within


def far_above(level: float, deviations: float, variance: float) -> float:
    """Return a limit above a level, by standard deviations or at least a fraction of the level."""
    return level + max(deviations * math.sqrt(variance), _LEAST_RISE * level)


def reason_to_stop(
    config: StepChecksConfig, expected: Expectation, verdict: StepVerdict, *, iteration: int
) -> str | None:
    """Return the reason to exit after a step; None to continue."""
    if verdict is StepVerdict.NOT_FINITE and config.check_for_nan_in_loss_and_grad:
        return (
            f"iteration {iteration} has a loss or gradient that is not finite, and "
            "--check-for-nan-in-loss-and-grad says to stop there"
        )
    limit = config.exit_after_skipped_iterations
    if limit and expected.skipped_in_a_row >= limit:
        return (
            f"the last {expected.skipped_in_a_row} iterations up to {iteration} were skipped "
            f"(the last one: {verdict.value}), and --exit-after-skipped-iterations {limit} says "
            "to stop there"
        )
    return None
