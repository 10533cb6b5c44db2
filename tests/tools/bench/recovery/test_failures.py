"""The figures of a study: kept in a file, in tables and a picture; its gates are functions."""

from __future__ import annotations

from importlib import import_module
from operator import attrgetter
from pathlib import Path

from tools.bench.recovery.cases import CASES, KINDS
from tools.bench.recovery.failures import Failure, Study
from tools.bench.recovery.gated import POINTS


def failure(case: str, kind: str, seconds: float, **changes: object) -> Failure:
    fields = {"where": 0, "computed_again": 0, "recovered": 3, "recovery_seconds": 0.5}
    fields |= {"step_seconds": 2.0, "load": 1.0, **changes}
    return Failure(case=case, kind=kind, seconds=seconds, **fields)  # type: ignore[arg-type]


def test_a_study_continues_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "study.json"
    study, case = Study.read(path), CASES[0]
    assert study.wanted(case)[0] in ("rank", "node")
    study.failures += [failure(case.name, "rank", 1.0)] * KINDS["rank"]
    study.step_seconds[case.name] = 2.0
    study.save()
    again = Study.read(path)
    assert again.failures == study.failures
    assert "rank" not in again.wanted(case)
    assert len(again.wanted(case)) == len(KINDS) - 1


def test_the_points_are_functions() -> None:
    for point in POINTS.values():
        assert callable(attrgetter(point.name)(import_module(point.module)))
