"""Which steps are skipped, when a run stops, the loss scale; which groups a round leaves out."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from statistics import mean, variance
from typing import Any

import pytest

from paro.files.schema import conform
from paro.schedule.loss_scale import LossScaleConfig, start_loss_scale, update_loss_scale
from paro.schedule.movement import MovementStatistics
from paro.schedule.step_checks import (
    Expectation,
    StepChecksConfig,
    StepVerdict,
    expect_after,
    judge,
    reason_to_stop,
)
from tests.helpers.refusals import refused

CHECKS = StepChecksConfig(check_for_spiky_loss=True, check_for_large_grads=True)


def verdict_on(
    expected: Expectation, config: StepChecksConfig = CHECKS, **found: Any
) -> StepVerdict:
    usual = {"loss": 4.0, "grad_norm": 1.0, "scale_can_fall": False, "has_tokens": True}
    return judge(config, expected, **(usual | found))


def after(num_steps: int, *, start: float = 4.0) -> Expectation:
    """Ordinary training: a loss that falls slowly, with noise."""
    noise, expected = random.Random(1), Expectation()
    for step in range(num_steps):
        loss = start - 0.002 * step + noise.gauss(0, 0.05)
        norm = 1.0 + noise.gauss(0, 0.1)
        verdict = verdict_on(expected, loss=loss, grad_norm=norm)
        assert verdict is StepVerdict.FINE, f"step {step}"
        expected = expect_after(expected, verdict, loss=loss, grad_norm=norm)
    return expected


def test_ordinary_training_is_never_skipped_and_its_mean_is_followed() -> None:
    expected = after(1000, start=8.0)
    assert expected.loss == pytest.approx(8.0 - 0.002 * 950, abs=0.05)
    # The noise, and the lag of the mean behind a falling loss.
    assert 0.04 < math.sqrt(expected.loss_variance) < 0.15
    assert expected.grad_norm == pytest.approx(1.0, abs=0.05)


def test_leaps_are_seen_where_they_are_asked_for() -> None:
    expected = after(200)
    assert verdict_on(expected, loss=5.5) is StepVerdict.SPIKY_LOSS
    assert verdict_on(expected, loss=expected.loss, grad_norm=11.0) is StepVerdict.LARGE_GRADS
    for loss, grad_norm in ((5.5, 1.0), (3.6, 11.0)):
        silent = verdict_on(expected, loss=loss, grad_norm=grad_norm, config=StepChecksConfig())
        assert silent is StepVerdict.FINE
    assert (
        verdict_on(after(99), loss=50.0, grad_norm=50.0) is StepVerdict.FINE
    )  # too early to judge


def test_leaps_are_counted_in_deviations_where_they_are_asked_for() -> None:
    expected = after(200)
    close = replace(CHECKS, spike_deviations=3.0)
    for leap, found in ((2.9, StepVerdict.FINE), (3.1, StepVerdict.SPIKY_LOSS)):
        loss = expected.loss + leap * math.sqrt(expected.loss_variance)
        assert verdict_on(expected, loss=loss, config=close) is found
    for leap, found in ((2.9, StepVerdict.FINE), (3.1, StepVerdict.LARGE_GRADS)):
        norm = expected.grad_norm + leap * math.sqrt(expected.grad_norm_variance)
        assert verdict_on(expected, loss=3.6, grad_norm=norm, config=close) is found
    assert math.sqrt(expected.grad_norm_variance) == pytest.approx(0.1, rel=0.3)
    some = replace(CHECKS, spikes_in_a_row=2)
    for in_a_row, found in ((1, StepVerdict.SPIKY_LOSS), (2, StepVerdict.FINE)):
        now = replace(expected, skipped_in_a_row=in_a_row)
        assert verdict_on(now, loss=50.0, config=some) is found
    for wrong, message in (
        ({"spike_deviations": 0.0}, "--spike-deviations 0.0"),
        ({"spikes_in_a_row": -1}, "--spikes-in-a-row -1"),
        ({"spikes_in_a_row": 20}, "--spikes-in-a-row 20 ... --exit-after-skipped-iterations 20"),
        ({"check_for_spiky_loss": False, "check_for_large_grads": False}, "--spikes-in-a-row"),
        ({"iterations_to_skip": (3, 0)}, "--iterations-to-skip 0"),
    ):
        refused(partial(replace, some, **wrong), message)


def test_a_loss_that_stays_high_becomes_the_usual_one() -> None:
    expected, skipped = after(200), 0
    for _ in range(100):
        verdict = verdict_on(expected, loss=5.0)
        skipped += verdict is StepVerdict.SPIKY_LOSS
        expected = expect_after(expected, verdict, loss=5.0, grad_norm=1.0)
    assert 1 <= skipped < 20
    assert expected.skipped_in_a_row == 0


def test_statistics_of_earlier_checkpoints_are_read() -> None:
    steps = {"num_steps": 3, "loss": 4.0, "loss_variance": 0.5}
    steps |= {"grad_norm": 1.0, "grad_norm_variance": 0.25, "skipped_in_a_row": 1}
    expected = conform(steps, Expectation, "state")
    assert asdict(expected) == steps
    # With a fourth step, of loss 2 and norm 3: 3/4 of (variance + 1/4 x 4)
    now = asdict(expect_after(expected, StepVerdict.FINE, loss=2.0, grad_norm=3.0))
    assert now == {
        **{"num_steps": 4, "loss": 3.5, "loss_variance": 1.125},
        **{"grad_norm": 1.5, "grad_norm_variance": 0.9375, "skipped_in_a_row": 0},
    }
    rounds = {"num_rounds": 3, "mean": 4.0, "variance": 0.5, "in_a_row": [0, 2]}
    usual = conform(rounds, MovementStatistics, "state")
    assert asdict(usual) == {**rounds, "in_a_row": (0, 2)}
    # Of two groups, 1 and 3, whose mean is 2: also 1/4 of the variance among them
    assert usual.after([1.0, 3.0]) == MovementStatistics(4, 3.5, 1.125 + 0.25, (0, 0))


def test_an_overflow_is_told_from_a_loss_that_is_no_number() -> None:
    expected = Expectation(skipped_in_a_row=2)
    overflow = verdict_on(expected, grad_norm=math.inf, scale_can_fall=True)
    assert overflow is StepVerdict.OVERFLOW
    assert expect_after(expected, overflow, loss=4.0, grad_norm=math.inf) == expected
    for loss, can_fall in ((4.0, False), (math.nan, True)):
        verdict = verdict_on(expected, loss=loss, grad_norm=math.nan, scale_can_fall=can_fall)
        assert verdict is StepVerdict.NOT_FINITE
        now = expect_after(expected, verdict, loss=loss, grad_norm=math.nan)
        assert now == Expectation(skipped_in_a_row=3)


def test_a_step_without_tokens_is_skipped_and_says_nothing_of_the_usual_loss() -> None:
    expected = after(200)
    verdict = verdict_on(expected, loss=math.nan, grad_norm=math.nan, has_tokens=False)
    assert verdict is StepVerdict.NO_TOKENS
    now = expect_after(expected, verdict, loss=math.nan, grad_norm=math.nan)
    assert now == replace(expected, skipped_in_a_row=1)
    checks = StepChecksConfig(check_for_nan_in_loss_and_grad=True)
    assert reason_to_stop(checks, now, verdict, iteration=7) is None


def test_when_to_stop() -> None:
    expected = Expectation(skipped_in_a_row=3)
    never = StepChecksConfig(exit_after_skipped_iterations=0)
    assert reason_to_stop(never, expected, StepVerdict.NOT_FINITE, iteration=7) is None
    third = StepChecksConfig(exit_after_skipped_iterations=3)
    message = reason_to_stop(third, expected, StepVerdict.SPIKY_LOSS, iteration=7)
    assert "last 3 iterations up to 7 were skipped (the last one: spiky loss)" in message
    fourth = StepChecksConfig(exit_after_skipped_iterations=4)
    assert reason_to_stop(fourth, expected, StepVerdict.NOT_FINITE, iteration=7) is None
    first = StepChecksConfig(check_for_nan_in_loss_and_grad=True)
    assert reason_to_stop(first, expected, StepVerdict.OVERFLOW, iteration=7) is None
    message = reason_to_stop(first, expected, StepVerdict.NOT_FINITE, iteration=7)
    assert "iteration 7" in message
    negative = partial(StepChecksConfig, exit_after_skipped_iterations=-1)
    refused(negative, "--exit-after-skipped-iterations -1")


def scales(config: LossScaleConfig, nonfinite: list[bool]) -> list[float]:
    """The scale after each step of a run."""
    state, seen = start_loss_scale(config), []
    for found in nonfinite:
        state = update_loss_scale(config, state, found_nonfinite=found)
        seen.append(state.scale)
    return seen


def dynamic(**changes: Any) -> LossScaleConfig:
    values: dict[str, Any] = {"initial_loss_scale": 64.0, "loss_scale_window": 3} | changes
    return LossScaleConfig(dynamic=True, **values)


def test_a_scale_follows_steps() -> None:
    """`x`: gradients are not finite."""
    for changes, steps, expected in (
        # It doubles after a window of finite steps, which one that is not begins anew.
        ({}, "......", [64, 64, 128, 128, 128, 256]),
        ({}, "..x...", [64, 64, 64, 64, 64, 128]),
        # Hysteresis forgives the first, and then every one halves; growth restores it.
        ({}, "xxx.x", [64, 32, 16, 16, 8]),
        ({}, "xx...xx", [64, 32, 32, 32, 64, 64, 32]),
        ({"min_loss_scale": 24.0}, "xxxxx", [64, 32, 24, 24, 24]),
    ):
        assert scales(dynamic(**changes), [step == "x" for step in steps]) == expected


def test_impossible_settings_name_their_flag() -> None:
    for changes, flag in (
        ({"loss_scale": -1.0}, "--loss-scale"),
        ({"min_loss_scale": 0.0}, "--min-loss-scale"),
        ({"initial_loss_scale": 0.5}, "--initial-loss-scale"),
        ({"loss_scale_window": 0}, "--loss-scale-window"),
        ({"hysteresis": 0}, "--hysteresis"),
    ):
        refused(lambda changes=changes: LossScaleConfig(**changes), flag)


def after_rounds(rounds: Sequence[Sequence[float]]) -> tuple[MovementStatistics, int]:
    """The statistics after rounds, and how many movements were left out in them."""
    usual, left_out = MovementStatistics(), 0
    for norms in rounds:
        left_out += usual.taking_part(norms).count(False)
        usual = usual.after(norms)
    return usual, left_out


def ordinary(num_rounds: int, *, groups: int = 4, level: float = 2.0) -> list[list[float]]:
    noise = random.Random(3)
    return [
        [level * (1.0 + noise.gauss(0, 0.03)) for _ in range(groups)] for _ in range(num_rounds)
    ]


def test_statistics_are_those_of_all_norms_in_the_first_rounds() -> None:
    rounds = ordinary(40)
    usual, _ = after_rounds(rounds)
    norms = [norm for each in rounds for norm in each]
    assert usual.mean == pytest.approx(mean(norms))
    assert usual.variance == pytest.approx(variance(norms), rel=0.01)


def test_ordinary_movements_are_taken_also_while_they_grow_or_shrink() -> None:
    for growth in (1.0, 1.02, 0.95):
        rounds = [[n * growth**i for n in norms] for i, norms in enumerate(ordinary(200))]
        assert after_rounds(rounds)[1] == 0, growth


def test_an_outlier_is_left_out_and_does_not_hide_the_next_one() -> None:
    usual, _ = after_rounds(ordinary(100))
    for outlier in (3.0, 1e30, math.inf, math.nan):
        norms = [2.0, 2.0, outlier, 2.0]
        assert usual.taking_part(norms) == (True, True, False, True)
        assert usual.after(norms).taking_part(norms) == (True, True, False, True)


def test_a_group_that_always_moves_further_takes_part_after_some_rounds_unless_far_away() -> None:
    usual, left_out = after_rounds([[*norms, 4.0] for norms in ordinary(100, groups=15)])
    assert left_out == 5  # in the first rounds with statistics
    others, widest = [2.0] * 15, usual.mean + 10.0 * math.sqrt(usual.variance)
    for last, is_taken in (
        (4.0, True),
        (0.99 * widest, True),
        (1.01 * widest, False),
        (1e30, False),
        (math.nan, False),
    ):
        assert usual.taking_part([*others, last]) == (*(True,) * 15, is_taken)
    assert usual.after([*others, 2.0]).taking_part([*others, 4.0]) == (*(True,) * 15, False)


def test_an_outlier_in_the_first_rounds_does_not_hide_later_ones() -> None:
    rounds = ordinary(50)
    rounds[10][1] = 1e6
    usual, _ = after_rounds(rounds)
    assert usual.taking_part([2.0, 2.0, 20.0, 2.0]) == (True, True, False, True)


def test_nothing_but_infinity_and_nan_is_left_out_before_there_are_statistics() -> None:
    norms = [1.0, 1e6, math.nan, math.inf]
    assert MovementStatistics().taking_part(norms) == (True, True, False, False)
    nothing = [math.nan] * 2
    assert MovementStatistics().taking_part(nothing) == (False, False)
    assert MovementStatistics().after(nothing) == MovementStatistics()


def test_a_level_that_all_groups_reach_is_taken_and_soon_usual() -> None:
    usual, _ = after_rounds(ordinary(100))
    higher = ordinary(20, level=6.0)
    for norms in higher:
        assert usual.taking_part(norms) == (True,) * 4
        usual = usual.after(norms)
    assert usual.taking_part([6.0, 2.0, 6.0, 6.0]) == (True,) * 4
