"""The study of bandwidth ratios: its model, figures, files, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paro.collectives.schedule import Op
from paro.planning.machine.machine import (
    BandwidthSource,
    LinkSpeed,
    Machine,
    Nic,
    bits_per_second,
    least_seconds,
)
from paro.topology import Axes
from tools.bench.study_ratios import BENCH, Point, Shape, main, model_seconds, point_of, table

SHAPE = Shape(nodes=2, ranks_per_node=4, inter="100mbit", num_bytes=32_000_000)


def test_the_benchmark_that_it_runs_is_there() -> None:
    assert BENCH.is_file()


def test_clusters_give_every_rank_the_same_share() -> None:
    assert SHAPE.spec(4, "per-rank").inter == "100mbit"
    assert SHAPE.spec(4, "shared").inter == "400mbit"
    assert SHAPE.spec(2.5, "shared").intra == SHAPE.spec(2.5, "per-rank").intra == "250mbit"


@pytest.mark.parametrize(("nic", "far_gain"), [("per-rank", 6 / 7), ("shared", 3 / 7)])
def test_model_far_out(nic: Any, far_gain: float) -> None:
    """With free links inside nodes, Ring sends 7 shards over one NIC, HO-Ring 4 or 1 at a time."""
    seconds = model_seconds(SHAPE, 1e9, nic)
    assert 1 - seconds["ho-ring"] / seconds["ring"] == pytest.approx(far_gain)
    assert seconds["h-ring"] == pytest.approx(seconds["ho-ring"], rel=1e-6)


def test_model_where_all_links_are_alike() -> None:
    seconds = model_seconds(SHAPE, 1, "per-rank")
    assert seconds == pytest.approx({"ring": 2.24, "h-ring": 0.32 + 1.92, "ho-ring": 1.92})
    shared = model_seconds(SHAPE, 1, "shared")  # three flows share a loopback for four
    assert shared["ring"] == pytest.approx(2.24 * 3 / 4)


@pytest.mark.parametrize("ratio", [0.5, 1, 3, 6, 20])
@pytest.mark.parametrize("nic", ["per-rank", "shared"])
def test_model_of_ho_ring_is_the_bound(ratio: float, nic: Any) -> None:
    spec = SHAPE.spec(ratio, nic)
    assert spec.intra is not None
    intra, inter = (
        LinkSpeed(
            bits_per_second=bits_per_second(rate),
            latency_seconds=0.0,
            bandwidth_source=BandwidthSource.TYPED,
        )
        for rate in (spec.intra, spec.inter)
    )
    machine = Machine(
        name="two nodes",
        source="typed",
        world_size=8,
        group_size=4,
        nic=Nic(nic),
        intra=intra,
        inter=inter,
    )
    least = least_seconds(machine, Op.ALL_GATHER, Axes.BOTH, SHAPE.num_bytes)
    assert model_seconds(SHAPE, ratio, nic)["ho-ring"] == pytest.approx(least)


def test_gains_are_paired_by_round() -> None:
    rounds = {"ring": [4.0, 8.0, 2.0], "h-ring": [2.0, 4.0, 1.0], "ho-ring": [1.0, 4.0, 1.0]}
    rows = [
        {"algorithm": name, "seconds": sorted(times)[1], "seconds_by_round": times}
        for name, times in rounds.items()
    ]
    point = point_of(SHAPE, 4, "shared", rows)
    assert point.gain("ring") == 0.5  # median of 0.75, 0.5, 0.5
    assert point.gain("h-ring") == 0.0
    assert "shared" in table([point])
    assert "50.0%" in table([point])


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--ratios", "1,0"], "--ratios 1,0"),
        (["--ratios", "1,x"], "--ratios 1,x"),
        (["--plot", "gains.txt"], "--plot gains.txt"),
        (["--inter", "fast"], "'fast'"),
    ],
)
def test_refusals(argv: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


@pytest.mark.verify
@pytest.mark.root
@pytest.mark.ranks
def test_measures_in_clusters_of_its_own(tmp_path: Path) -> None:
    out, picture = tmp_path / "ratios.json", tmp_path / "ratios.png"
    argv = ["--nodes", "2", "--ranks-per-node", "2", "--ratios", "4", "--bytes", "400000"]
    assert main([*argv, "--rounds", "2", "--json", str(out), "--plot", str(picture)]) == 0
    found = json.loads(out.read_text())
    points = [Point(**point) for point in found["points"]]
    assert [point.nic for point in points] == ["per-rank", "shared"]
    for point in points:
        assert all(seconds > 0 for seconds in point.seconds.values())
        assert [len(gains) for gains in point.gains_by_round.values()] == [2, 2]
    assert picture.read_bytes().startswith(b"\x89PNG")
