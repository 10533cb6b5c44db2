"""Every learning rate curve at points computed by hand."""

import math
from typing import Any

import pytest

from paro.errors import UserError
from paro.optim.lr_schedule import LrSchedule, ScheduleConfig

# 100 samples of warm-up, decay from there to sample 1100 (1000 samples), lr 1.0 down to 0.1.
BASE: dict[str, Any] = {
    "lr": 1.0,
    "min_lr": 0.1,
    "lr_decay_samples": 1100,
    "lr_warmup_samples": 100,
}


def make(**changes: Any) -> LrSchedule:
    return LrSchedule(ScheduleConfig(**(BASE | changes)))


def test_warmup_is_linear_and_reaches_the_peak_at_its_last_sample() -> None:
    schedule = make(lr_warmup_init=0.2)
    assert schedule.lr_at(0) == 0.2
    assert schedule.lr_at(50) == pytest.approx(0.6, rel=1e-15)
    assert schedule.lr_at(100) == 1.0


def test_without_warmup_the_first_step_has_the_peak() -> None:
    assert make(lr_warmup_samples=0).lr_at(0) == 1.0


@pytest.mark.parametrize("style", ["linear", "cosine"])
@pytest.mark.parametrize(
    ("samples", "linear", "cosine"),
    [
        (350, 0.775, 0.1 + 0.9 * (0.5 + math.sqrt(2) / 4)),
        (600, 0.55, 0.55),
        (850, 0.325, 0.1 + 0.9 * (0.5 - math.sqrt(2) / 4)),
        (1100, 0.1, 0.1),
        (1101, 0.1, 0.1),
    ],
)
def test_linear_and_cosine(style: str, samples: int, linear: float, cosine: float) -> None:
    expected = {"linear": linear, "cosine": cosine}[style]
    assert make(lr_decay_style=style).lr_at(samples) == pytest.approx(expected, rel=1e-12)


def test_constant_stays_at_the_peak_past_the_decay() -> None:
    schedule = make(lr_decay_style="constant")
    assert schedule.lr_at(50) == 0.5
    assert schedule.lr_at(101) == schedule.lr_at(10**6) == 1.0


def test_inverse_square_root_is_bounded_below() -> None:
    schedule = make(lr_decay_style="inverse-square-root", min_lr=0.4)
    assert schedule.lr_at(400) == pytest.approx(0.5, rel=1e-15)
    assert schedule.lr_at(900) == pytest.approx(0.4, rel=1e-15)  # a third of the peak is below
    assert schedule.lr_at(1101) == 0.4


def test_inverse_square_root_without_warmup_counts_from_one() -> None:
    schedule = make(lr_decay_style="inverse-square-root", lr_warmup_samples=0)
    assert schedule.lr_at(0) == 1.0
    assert schedule.lr_at(4) == 0.5


# The tail has 400 samples: it starts after sample 700, and its first quarter ends at 800.
@pytest.mark.parametrize(
    ("tail", "left_at_quarter", "left_at_end"),
    [
        ("linear", 0.75, 0.0),
        ("cosine", 0.5 + math.sqrt(2) / 4, 0.0),
        ("exponential", 2 * 0.5**0.25 - 1, 0.0),
        ("minus_sqrt", 0.5, 0.0),
    ],
)
def test_wsd_is_stable_and_then_falls_along_its_tail(
    tail: str, left_at_quarter: float, left_at_end: float
) -> None:
    schedule = make(lr_decay_style="WSD", lr_wsd_decay_style=tail, lr_wsd_decay_samples=400)
    assert schedule.lr_at(101) == schedule.lr_at(700) == 1.0
    assert schedule.lr_at(800) == pytest.approx(0.1 + 0.9 * left_at_quarter, rel=1e-12)
    assert schedule.lr_at(1100) == pytest.approx(0.1 + 0.9 * left_at_end, rel=1e-12)
    assert schedule.lr_at(1101) == 0.1


@pytest.mark.parametrize(
    ("style", "quarter"), [("linear", 0.025), ("cosine", 0.1 * (0.5 - math.sqrt(2) / 4))]
)
def test_weight_decay_grows_to_its_end(style: str, quarter: float) -> None:
    schedule = make(
        start_weight_decay=0.0,
        end_weight_decay=0.1,
        weight_decay_incr_style=style,
        weight_decay_incr_samples=1000,
    )
    assert schedule.weight_decay_at(0) == pytest.approx(0.0, abs=1e-17)
    assert schedule.weight_decay_at(250) == pytest.approx(quarter, rel=1e-12)
    assert schedule.weight_decay_at(500) == pytest.approx(0.05, rel=1e-12)
    assert schedule.weight_decay_at(1000) == schedule.weight_decay_at(2000) == 0.1


def test_constant_weight_decay() -> None:
    schedule = make(start_weight_decay=0.1, end_weight_decay=0.1)
    assert schedule.weight_decay_at(0) == schedule.weight_decay_at(5000) == 0.1


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"lr": 0.0}, "--lr 0.0"),
        ({"lr": -1.0}, "--lr -1.0"),
        ({"lr": math.nan}, "--lr nan"),
        ({"min_lr": 2.0}, "--min-lr 2.0"),
        ({"min_lr": -0.1}, "--min-lr -0.1"),
        ({"lr_warmup_init": 1.5}, "--lr-warmup-init 1.5"),
        ({"lr_warmup_samples": 1100}, "--lr-warmup-iters"),
        ({"lr_decay_samples": 0}, "--lr-decay-iters"),
        ({"lr_decay_style": "WSD"}, "--lr-wsd-decay-iters"),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_samples": 1200}, "1200"),
        ({"lr_decay_style": "step"}, "--lr-decay-style step"),
        ({"start_weight_decay": 0.2, "end_weight_decay": 0.1}, "--start-weight-decay"),
        ({"start_weight_decay": 0.0, "end_weight_decay": 0.1}, "--weight-decay-incr-style"),
    ],
)
def test_contradictions_name_their_flag(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(UserError, match="--") as error:
        make(**changes)
    assert part in str(error.value)
