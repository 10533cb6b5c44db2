"""The planner's memory, times, bytes and choices are the recorded ones, to the last digit."""

from __future__ import annotations

import json

import pytest

from tests.paro.planning.fixed_workloads import RECORD, predicted

OTHERS = [pytest.param(part, marks=pytest.mark.verify) for part in range(1, 6)]


@pytest.mark.slow("plans 67 workloads")
@pytest.mark.parametrize("part", [0, *OTHERS])
def test_predictions_are_the_recorded_ones(part: int) -> None:
    for index, line in enumerate(RECORD.read_text(encoding="utf-8").splitlines()):
        if index % 6 == part:
            assert predicted(index) == json.loads(line), f"request {index}"
