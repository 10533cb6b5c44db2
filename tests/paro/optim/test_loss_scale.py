"""The loss scale: constant, or Megatron's dynamic one with hysteresis."""

from typing import Any

import pytest

from paro.optim.loss_scale import LossScaleConfig, start_loss_scale, update_loss_scale
from tests.helpers.refusals import refused


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


def test_defaults_are_megatrons() -> None:
    state = start_loss_scale(LossScaleConfig(dynamic=True))
    assert (state.scale, state.growth_tracker, state.hysteresis_tracker) == (2.0**32, 0, 2)


@pytest.mark.parametrize(("loss_scale", "expected"), [(None, 1.0), (128.0, 128.0)])
def test_a_constant_scale_never_moves(loss_scale: float | None, expected: float) -> None:
    config = LossScaleConfig(loss_scale=loss_scale)
    assert scales(config, [True, True, False] * 1000) == [expected] * 3000


def test_it_doubles_after_a_window_of_finite_steps() -> None:
    assert scales(dynamic(), [False] * 6) == [64, 64, 128, 128, 128, 256]


def test_a_nonfinite_step_restarts_the_window() -> None:
    assert scales(dynamic(), [False, False, True, False, False, False])[-2:] == [64, 128]


def test_hysteresis_forgives_the_first_and_then_every_one_halves() -> None:
    assert scales(dynamic(), [True, True, True, False, True]) == [64, 32, 16, 16, 8]


def test_growth_restores_the_hysteresis() -> None:
    steps = [True, True, False, False, False, True, True]
    assert scales(dynamic(), steps) == [64, 32, 32, 32, 64, 64, 32]


def test_it_never_falls_below_the_minimum() -> None:
    assert scales(dynamic(min_loss_scale=24.0), [True] * 5) == [64, 32, 24, 24, 24]


def test_a_stored_state_goes_on_as_if_nothing_had_happened() -> None:
    config, steps = dynamic(), [False, True, False, False, False, True, True, False]
    state = start_loss_scale(config)
    for found in steps[:4]:
        state = update_loss_scale(config, state, found_nonfinite=found)
    restored = type(state)(
        scale=state.scale,
        growth_tracker=state.growth_tracker,
        hysteresis_tracker=state.hysteresis_tracker,
    )
    for found in steps[4:]:
        restored = update_loss_scale(config, restored, found_nonfinite=found)
    assert restored.scale == scales(config, steps)[-1]


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"loss_scale": -1.0}, "--loss-scale"),
        ({"min_loss_scale": 0.0}, "--min-loss-scale"),
        ({"initial_loss_scale": 0.5}, "--initial-loss-scale"),
        ({"loss_scale_window": 0}, "--loss-scale-window"),
        ({"hysteresis": 0}, "--hysteresis"),
    ],
)
def test_impossible_settings_name_their_flag(changes: dict[str, Any], flag: str) -> None:
    refused(lambda: LossScaleConfig(**changes), flag)
