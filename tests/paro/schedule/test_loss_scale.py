"""The loss scale: constant, or Megatron's dynamic one with hysteresis."""

from typing import Any

import pytest

from paro.schedule.loss_scale import LossScaleConfig, start_loss_scale, update_loss_scale
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


@pytest.mark.parametrize(
    ("changes", "steps", "expected"),
    [
        # It doubles after a window of finite steps, which one that is not begins anew.
        ({}, "......", [64, 64, 128, 128, 128, 256]),
        ({}, "..x...", [64, 64, 64, 64, 64, 128]),
        # Hysteresis forgives the first, and then every one halves; growth restores it.
        ({}, "xxx.x", [64, 32, 16, 16, 8]),
        ({}, "xx...xx", [64, 32, 32, 32, 64, 64, 32]),
        ({"min_loss_scale": 24.0}, "xxxxx", [64, 32, 24, 24, 24]),
    ],
)
def test_a_dynamic_scale_follows_the_steps(
    changes: dict[str, float], steps: str, expected: list[int]
) -> None:
    """`x`: gradients are not finite."""
    assert scales(dynamic(**changes), [step == "x" for step in steps]) == expected


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
