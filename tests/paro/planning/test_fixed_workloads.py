"""The planner's memory, times, bytes and choices are the recorded ones, to the last digit."""

from __future__ import annotations

import pytest

from tests.paro.planning.fixed_workloads import predicted, recorded


@pytest.mark.slow("plans 20 workloads")
@pytest.mark.parametrize("part", range(10))
def test_predictions_are_the_recorded_ones(part: int) -> None:
    for index, wanted in recorded():
        if index % 10 == part:
            assert predicted(index) == wanted, f"request {index}"
