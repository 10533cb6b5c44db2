"""The cost of reporting is compared between neighbouring steps of a run that reports."""

from __future__ import annotations

import pytest

from tests.helpers.commands import measured
from tests.helpers.training import TINY
from tools.bench import bench_reporting
from tools.bench.bench_reporting import costs, is_reported, main


def step(wall: float, inside: float) -> dict[str, float]:
    return {"wall": wall, "cpu": 2 * wall, "wall in report": inside, "cpu in report": inside}


def test_neighbours_are_compared_and_the_first_round_is_left_out() -> None:
    steps = [step(99.0, 0.0), step(99.0, 9.0)]
    for drift in (1.0, 2.0, 4.0):
        pair = [step(drift, 0.0), step(drift * 1.01, 0.02)]
        steps += pair[:: 1 if is_reported(len(steps) + 1) else -1]
    wall, cpu = costs([*steps, step(50.0, 0.0)])
    assert (wall["clock"], cpu["clock"]) == ("wall", "cpu")
    assert wall["bare"] == [1.0, 2.0, 4.0]
    assert wall["part"] == pytest.approx(0.01)
    assert wall["part_in_report"] == pytest.approx(0.01)


@pytest.mark.slow("trains under every reporter")
def test_every_second_step_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    flags = f"{TINY} --eval-iters 0 --peak-tflops 1 --log-interval 1"
    monkeypatch.setattr(bench_reporting, "MODEL", flags)
    told, rows = measured(main, "--rounds", 3)
    assert [row["clock"] for row in rows] == ["wall", "cpu"]
    assert all(len(row["bare"]) == len(row["reported"]) == 3 for row in rows)
    assert min(rows[0]["in_report"]) > 0.0
    assert "with TensorBoard, W&B and the view" in told
