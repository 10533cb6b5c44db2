"""The figures of a study: kept in a file, in tables and a picture."""

from __future__ import annotations

from pathlib import Path

from tools.bench.recovery.cases import CASES, KINDS
from tools.bench.recovery.failures import Failure, Study, plot, tables


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


def test_tables_and_picture(tmp_path: Path) -> None:
    study = Study(path=tmp_path / "study.json")
    disk = next(case for case in CASES if not case.own_flags)
    study.failures = [
        failure("III", "rank", 10.0),
        failure("III", "node", 14.0, computed_again=1, recovery_seconds=3.0),
        failure(disk.name, "node", 40.0, computed_again=5, recovered=None, recovery_seconds=None),
    ]
    study.steady["III"] = {"step_ratio": 1.013, "nic_bytes_ratio": 1.0}
    text = tables(study)
    assert "| III | 2 | 1 | 12.0, 14.0 | 1.75 | 1.50 |" in text
    assert f"| {disk.name} | 1 | 5 | 40.0, 40.0 | from disk |  |" in text
    assert "| node | 1 | 1 | 14.0, 14.0 |" in text, "from memory alone"
    assert "| III | +1.3% | +0.00% |" in text
    plot(study, tmp_path / "study.png")
    assert (tmp_path / "study.png").stat().st_size > 5_000
