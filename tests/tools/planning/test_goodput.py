"""Goodput against simulated failures; labels in pictures of plans."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Text

from paro.planning.planner import plan
from paro.planning.search_space import PlanRequest
from tests.helpers.refusals import refused
from tests.paro.planning.cases import FEW, machine, plan_request
from tools.planning import goodput, pictures
from tools.planning.goodput import COPY_SHARE, Failures, from_disk, from_memory
from tools.planning.labels import is_within
from tools.planning.pictures import draw_front
from tools.planning.tables import letter_rows, rotated_rows


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


ONE_NODE = {"machine": machine(world_size=8), "global_batch_size": 48}


@pytest.mark.slow("draws, and searches all candidates")
@pytest.mark.parametrize(
    "case",
    [
        plan_request(memory_bytes=10**8),
        plan_request(machine=machine(intra=30, inter=25), micro_batch_size=1),
        pytest.param(plan_request(), marks=pytest.mark.verify),
        pytest.param(plan_request(**ONE_NODE), marks=pytest.mark.verify),
    ],
    ids=["nothing fits", "close together", "fast", "one node"],
)
def test_labels_cover_neither_each_other_nor_points(
    case: PlanRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []

    @contextmanager
    def drawing(*given: Any, **more: Any) -> Iterator[Any]:
        with own(*given, **more) as (figure, panels):
            yield figure, panels
            drawn.append(figure)
            figure.canvas.draw()
            check(*panels)

    def check(axes: Any) -> None:
        # An annotation's own extent has the line to its point in it.
        named = {text.get_text(): Text.get_window_extent(text) for text in axes.texts}
        assert {name for text in named for name in text.split()} >= {"NNN", "IIG", "GGG"}
        for (name, box), (other_name, other) in combinations(named.items(), 2):
            assert not box.fully_overlaps(other), f"{name} and {other_name}"
        for row in rows:
            x, y = axes.transData.transform((row.memory_bytes / 1e9, row.seconds))
            covering = [name for name, box in named.items() if box.fully_contains(x, y)]
            assert not covering, f"the point of {row.candidate.name} is under {covering}"
        inside = axes.get_window_extent()
        outside = {name: box for name, box in named.items() if not is_within(box, inside)}
        assert not outside, inside
        for axis in (axes.xaxis, axes.yaxis):
            ticks = [*axis.get_majorticklabels(), *axis.get_minorticklabels()]
            seen = [tick for tick in ticks if tick.get_visible() and tick.get_text()]
            shown = [tick.get_window_extent() for tick in seen]
            assert not any(box.fully_overlaps(other) for box, other in combinations(shown, 2))

    own = pictures.drawing
    monkeypatch.setattr(pictures, "drawing", drawing)
    rows = (*letter_rows(case), *rotated_rows(case))
    draw_front(tmp_path / "front.png", case, rows, plan(case, FEW))
    assert drawn, "the labels were checked"
