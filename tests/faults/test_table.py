"""The page of faults has what `make verify` recorded; faults strike at functions in use."""

from __future__ import annotations

import ast
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from importlib import import_module
from inspect import getsource
from operator import attrgetter
from typing import Any

from tests.faults.job import Point
from tests.helpers.ranks import ROOT

RECORD = ROOT / "examples" / "measured" / "verify.jsonl"


def test_the_page_has_the_table_of_the_record() -> None:
    outcomes = recorded()
    page = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    assert {*table(outcomes)} <= {*page.splitlines()}
    assert f"{len(outcomes)} faults" in page


def test_the_points_are_functions_that_are_called() -> None:
    for point in Point:
        path, _, name = point.partition(":")
        module = import_module(path)
        assert callable(attrgetter(name)(module))
        nodes = ast.walk(ast.parse(getsource(module)))
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        assert "." in name or name in used, f"{point}: its callers have it from another module"


def recorded() -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()]
    return [row["properties"]["fault"] for row in rows if "fault" in row["properties"]]


def table(outcomes: Sequence[dict[str, Any]]) -> list[str]:
    """A row for each kind of fault: median and most, where several were tried."""
    groups: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome["fault"]].append(outcome)
    rows = []
    for fault, tried in groups.items():
        ends = sorted({int(n) for one in tried for n in re.findall(r"-?\d+", one["end"][:14])})
        cells = [
            fault,
            str(len(tried)),
            f"status {', '.join(map(str, ends))}" if ends else "",
            _seconds([one["seconds_to_end"] for one in tried]),
            _seconds([s for one in tried if (s := one["seconds_to_step"]) is not None]),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _seconds(values: Sequence[float]) -> str:
    if not values:
        return ""
    median, most = f"{statistics.median(values):.1f}", f"{max(values):.1f}"
    return median if median == most else f"{median}, at most {most}"


if __name__ == "__main__":
    print(*table(recorded()), sep="\n")
