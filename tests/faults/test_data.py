"""Faults of a corpus: files cut short, and indices that another process never finishes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults.conftest import Scenario
from tests.faults.job import LIMIT_SECONDS, Run
from tests.faults.points import Point
from tests.helpers.corpora import write_corpus

pytestmark = [pytest.mark.verify, pytest.mark.ranks]


@pytest.fixture(autouse=True)
def corpus(scenario: Scenario, tmp_path: Path) -> None:
    """One process trains on a corpus."""
    prefix = write_corpus(tmp_path / "corpus", [[list(range(100)) * 100]])
    scenario.ranks, scenario.plain = 1, True
    scenario.flags = ("--data-path", prefix, "--split", "8,1,1")


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_truncated_data(scenario: Scenario, suffix: str, tmp_path: Path) -> None:
    assert scenario.start("--exit-interval", 4).end(60.0) == [0]
    path = tmp_path / f"corpus{suffix}"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 5])
    scenario.strikes()
    scenario.ends(scenario.start(), [2], f"corpus{suffix}", within=30.0)
    path.write_bytes(whole)
    scenario.resumes(4)


@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_data_cut_short_in_a_step(scenario: Scenario, suffix: str, tmp_path: Path) -> None:
    """While it is open. The order in the cache is built again by the next start."""
    job = scenario.paused(Point.READ_SAMPLE, 60)
    paths = list(tmp_path.rglob(f"*{suffix}"))
    contents = [path.read_bytes() for path in paths]
    for path in paths:
        os.truncate(path, 100)
    scenario.run.release()
    scenario.ends(job, [2], "another program has shortened it", within=30.0)
    if suffix == ".bin":
        paths[0].write_bytes(contents[0])
    scenario.resumes(6)


def test_a_stuck_builder_of_indices(scenario: Scenario, tmp_path: Path) -> None:
    """Another run holds the lock of the corpus."""
    builder, first = scenario.paused(Point.BUILD_INDEX, 1), scenario.run
    scenario.run = Run(tmp_path / "other")
    waiting = scenario.start()
    told = f"for process {builder.pids()[0]} of this machine, which builds indices and holds the"
    scenario.ends(waiting, [1], told, within=LIMIT_SECONDS + 20)
    first.release()
    assert builder.end(30.0) == [0]
    scenario.resumes(0)
    assert first.final_sums() == scenario.run.final_sums()
