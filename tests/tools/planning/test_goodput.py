"""Goodput: the formulas against simulated failures, limits and the best interval."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest

from tests.helpers.refusals import refused
from tools.planning import goodput
from tools.planning.goodput import COPY_SHARE, Failures, from_disk, from_memory


def failures_of(**changes: float) -> Failures:
    fields = {
        "num_nodes": 8,
        "mtbf_hours": 8.0,
        "restart_seconds": 120.0,
        "checkpoint_seconds": 30.0,
    }
    return Failures(**{**fields, **changes})  # type: ignore[arg-type]


def simulated(between: float, work: float, cost: float, restart: float, segments: int) -> float:
    """The share of useful work with exponential failures, also while a run restarts."""
    draw = random.Random(1)
    total = 0.0
    for _ in range(segments):
        need, at_start = work + cost, False
        while True:
            length = need + (restart if at_start else 0.0)
            failure = draw.expovariate(1 / between)
            if failure >= length:
                total += length
                break
            total += failure
            at_start = True
    return segments * work / total


def test_the_share_is_that_of_simulated_failures() -> None:
    for between, work, cost, restart in ((3600, 900, 30, 150), (600, 300, 60, 120)):
        expected = simulated(between, work, cost, restart, 40_000)
        # Daly's formula restarts before the first segment too: once less is the same ratio.
        own = goodput._share(between, work, cost, restart)
        assert own == pytest.approx(expected, rel=0.03)


def test_no_other_interval_is_better() -> None:
    failures = failures_of()
    best = from_disk(failures)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        other = goodput._share(
            failures.seconds_between, factor * best.checkpoint_seconds, 30.0, 150.0
        )
        assert other < best.share
    young = math.sqrt(2 * 30.0 * failures.seconds_between)
    assert best.checkpoint_seconds == pytest.approx(young, rel=0.1)


def test_memory_beats_disk_where_a_node_may_be_lost() -> None:
    failures = failures_of()
    shares = [
        from_memory(failures, survives=k, step_seconds=10.0, transfer_seconds=5.0).share
        for k in range(4)
    ]
    assert shares == sorted(shares)
    assert shares[0] < from_disk(failures).share < shares[1]
    every_step = goodput._share(failures.seconds_between, 10.0, 10.0 * COPY_SHARE, 125.0)
    assert every_step < shares[3] < 1.0


@pytest.mark.parametrize("name", ["mtbf_hours", "restart_seconds"])
def test_numbers_that_make_no_sense(name: str) -> None:
    for value in (0.0, -1.0, math.inf, math.nan):
        refused(partial(failures_of, **{name: value}), f"--{name.replace('_', '-')} ")
