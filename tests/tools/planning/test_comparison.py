"""Errors, the order of pairs, and what auto loses, from made-up measurements."""

from __future__ import annotations

from typing import Any

import pytest

from paro.planning.planner import Estimator
from paro.planning.settings import Case
from paro.strategy import legal_letters
from tests.helpers.ranks import ROOT
from tests.paro.planning.cases import case as make_case
from tools.planning.comparison import CONSTANT_BYTES, Row, compare
from tools.study_plan import chapters_of

NAMES = ("NNI", "IIG", "GGG")


@pytest.fixture
def case() -> Case:
    return make_case()


def measured(case: Case, factors: dict[str, float]) -> list[dict[str, Any]]:
    """What would have been measured, were the planner wrong by these factors."""
    estimator = Estimator(case)
    return [
        {
            "setting": f"{name}@native",
            "seconds": factor * estimator.estimate(case.setting(case.strategy(name))).seconds,
            "peak_in_use": None,
            "exposed": {},
        }
        for name, factor in factors.items()
    ]


def test_what_was_predicted_has_no_error(case: Case) -> None:
    found = compare(case, measured(case, dict.fromkeys(NAMES, 1.0)))
    assert found.worst_error == pytest.approx(0.0, abs=1e-9)
    assert found.wrong_pairs() == []
    assert all(choice.ratio == 1.0 for choice in found.choices)


def test_errors_are_of_what_was_measured(case: Case) -> None:
    found = compare(case, measured(case, {"NNI": 2.0, "IIG": 1.0, "GGG": 0.8}))
    assert [round(row.error, 3) for row in found.rows] == [-0.5, 0.0, 0.25]
    assert found.median_error == pytest.approx(0.25)


def test_a_pair_in_the_wrong_order_is_found_and_costs_auto(case: Case) -> None:
    found = compare(case, measured(case, {"NNI": 1.0, "IIG": 100.0, "GGG": 1.0}))
    assert ("GGG", "IIG") in [(fast.strategy, slow.strategy) for fast, slow in found.wrong_pairs()]
    assert max(choice.ratio for choice in found.choices) > 2


def test_what_rotates_is_compared_as_such_and_chosen_by_nobody(case: Case) -> None:
    rows = measured(case, {"IIG": 1.0})
    for way, name in (("rotate", "IIG rotated"), ("in-place", "IIG rotated in place")):
        found = compare(case, [row | {"setting": f"{row['setting']}+{way}"} for row in rows])
        assert found.rows[0].strategy == name
        assert found.rows[0].predicted > rows[0]["seconds"]  # of what is gathered
        assert found.choices == ()


@pytest.mark.parametrize(
    ("peak", "error"),
    [
        (100_000_000, 0.0),
        (100_000_000 + CONSTANT_BYTES, 0.0),
        (80_000_000, 0.25),
        (2 * (100_000_000 + CONSTANT_BYTES), -0.5),
    ],
)
def test_memory_may_lie_between_the_prediction_and_the_constant(peak: int, error: float) -> None:
    row = Row(
        strategy="IIG",
        seconds=1.0,
        predicted=1.0,
        peak_bytes=peak,
        predicted_bytes=100_000_000,
        exposed={},
        measured_exposed={},
    )
    assert row.memory_error == pytest.approx(error)


def test_recorded_steps_are_predicted() -> None:
    """What the README says of the measurements in examples/measured holds for this planner."""
    chapters = chapters_of(ROOT / "examples/measured")
    everything = [row for chapter in chapters for row in chapter.compared.rows]
    assert all(abs(row.memory_error or 0.0) < 0.003 for row in everything)
    rotated = [c.compared for c in chapters if c.collective.endswith("rotated")]
    gathered = [c.compared for c in chapters if not c.collective.endswith("rotated")]
    assert (len(gathered), len(rotated)) == (8, 2)
    assert all(len(comparison.rows) == len(legal_letters()) for comparison in gathered)
    assert all(comparison.median_error < 0.08 for comparison in gathered)
    assert max(comparison.worst_error for comparison in gathered) < 0.205
    assert sum(len(comparison.wrong_pairs()) for comparison in gathered) <= 16
    assert all(choice.ratio < 1.06 for comparison in gathered for choice in comparison.choices)
    assert max(comparison.worst_error for comparison in rotated) < 0.31
    assert not any(comparison.wrong_pairs() for comparison in rotated)
