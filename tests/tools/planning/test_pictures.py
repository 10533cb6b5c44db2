"""Labels in pictures of plans lie beside their points and cover nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Text

from paro.planning.planner import plan
from paro.planning.search_space import PlanRequest
from tests.paro.planning.cases import FEW, machine, plan_request
from tools.planning import pictures
from tools.planning.labels import is_within
from tools.planning.pictures import draw_front
from tools.planning.tables import letter_rows, rotated_rows

ONE_NODE = {"machine": machine(world_size=8), "global_batch_size": 48}


@pytest.mark.slow("draws, and searches all candidates")
@pytest.mark.parametrize(
    "case",
    [
        plan_request(),
        plan_request(memory_bytes=10**8),
        plan_request(machine=machine(intra=30, inter=25), micro_batch_size=1),
        pytest.param(plan_request(**ONE_NODE), marks=pytest.mark.verify),
    ],
    ids=["fast", "nothing fits", "close together", "one node"],
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
