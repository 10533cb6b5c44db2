"""The benchmark saves and loads as stated, and counts memory in addition to the shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paro.checkpoint.chunks import MAX_ITEM_BYTES
from paro.files.object_cache import ObjectCache
from paro.files.object_store import path_of
from tests.helpers.object_server import BUCKET, ObjectServer
from tests.helpers.scripts import run_script
from tools import bench_checkpoint
from tools.bench_checkpoint import main

TOOL = "tools/bench_checkpoint.py"


SMALL = ["--params", 100_000, "--hidden-size", 32, "--rounds", 2]
UNIT = 12 * 32 * 32


def bench(folder: Path, *flags: object, nproc: int | None = 0, place: str = "") -> dict[str, Any]:
    """The figures, of a process for each rank or, with None, of this one."""
    out = folder / "figures.json"
    runs = place or str(folder / "runs")
    words = [*map(str, ("--folder", runs, "--json", out, *flags))]
    if nproc is None:
        main(words)
    else:
        done = run_script([TOOL, *words], nproc, timeout=3000.0)
        assert done.returncode == 0, done.stdout + done.stderr
    assert not path_of(runs).exists()
    figures: dict[str, Any] = json.loads(out.read_text())
    return figures


@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=[pytest.mark.verify, pytest.mark.ranks])]
)
def test_bandwidths_of_both_ways(tmp_path: Path, ranks: int) -> None:
    figures = bench(tmp_path, *SMALL, nproc=ranks if ranks > 1 else None)
    assert figures["bytes"] == 12 * (100_000 // UNIT) * UNIT
    assert ranks * figures["bytes_of_a_rank"] == figures["bytes"]
    assert figures["part_of_the_disk"].keys() == {"save", "load"}
    assert all(len(times) == 2 for times in figures["seconds"].values())


@pytest.mark.process
@pytest.mark.parametrize("flags", [SMALL, pytest.param(["--steps", 1], marks=pytest.mark.verify)])
def test_a_store_is_measured_as_a_disk_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[object]
) -> None:
    monkeypatch.setattr(ObjectCache, "folder", tmp_path / "cache")
    small = bench_checkpoint.MODEL.replace("hidden-size 512", "hidden-size 32")
    monkeypatch.setattr(bench_checkpoint, "MODEL", small.replace("8192", "64"))
    with ObjectServer().running():
        figures = bench(tmp_path, *flags, "--rounds", 1, nproc=None, place=f"s3://{BUCKET}/runs")
    if "seconds" in figures:
        assert figures["seconds"].keys() == {"write", "save", "read", "load"}
    else:
        assert figures["steps"]["during_a_save"]


@pytest.mark.verify
def test_memory_beside_a_billion_parameters(tmp_path: Path) -> None:
    """12 GB of state: in addition to its shards a rank needs less than one unit."""
    size = ["--params", 1_010_000_000, "--hidden-size", 2048, "--rounds", 1]  # 20 units
    figures = bench(tmp_path, *size)
    assert figures["bytes"] > 12e9
    assert figures["bytes_of_a_unit_and_rank"] == 12 * 12 * 2048 * 2048
    for way, peak in figures["peak_bytes_beside_the_shards"].items():
        assert peak < 8 * MAX_ITEM_BYTES < figures["bytes_of_a_unit_and_rank"], way
