"""Faults of a corpus: files cut short, and indices that another process never finishes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults.conftest import Scenario
from tests.faults.job import LIMIT_SECONDS, Run
from tests.helpers.corpora import write_corpus

pytestmark = [pytest.mark.verify, pytest.mark.ranks]


@pytest.fixture
def corpus(tmp_path: Path) -> list[object]:
    """Flags that train on a corpus."""
    write_corpus(tmp_path / "corpus", [[list(range(100)) * 100]])
    return ["--data-path", tmp_path / "corpus", "--split", "8,1,1"]


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_truncated_data(
    scenario: Scenario, corpus: list[object], suffix: str, tmp_path: Path
) -> None:
    scenario.ranks = 1
    assert scenario.start(*corpus, "--exit-interval", 4, plain=True).end(60.0) == [0]
    path = tmp_path / f"corpus{suffix}"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 5])
    scenario.strikes()
    scenario.ends(scenario.start(*corpus, plain=True), [2], f"corpus{suffix}", within=30.0)
    path.write_bytes(whole)
    goes_on(scenario, scenario.run, corpus, 5)
    is_like(scenario.run, undisturbed(tmp_path, corpus))


@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_data_cut_short_in_a_step(
    scenario: Scenario, corpus: list[object], suffix: str, tmp_path: Path
) -> None:
    """While it is open. The order in the cache is built again by the next start."""
    scenario.ranks = 1
    job = scenario.paused("data.gpt_dataset:GPTDataset.__getitem__", 60, *corpus, plain=True)
    paths = list(tmp_path.rglob(f"*{suffix}"))
    contents = [path.read_bytes() for path in paths]
    for path in paths:
        os.truncate(path, 100)
    scenario.run.release()
    scenario.ends(job, [2], "another program has shortened it", within=30.0)
    if suffix == ".bin":
        paths[0].write_bytes(contents[0])
    assert scenario.run.saved() == 6
    goes_on(scenario, scenario.run, corpus, 7)
    is_like(scenario.run, undisturbed(tmp_path, corpus))


def test_a_stuck_builder_of_indices(
    scenario: Scenario, corpus: list[object], tmp_path: Path
) -> None:
    """Another run holds the lock of the corpus."""
    scenario.ranks = 1
    builder = scenario.paused("data.index_cache:build_order", 1, *corpus, plain=True)
    other = Run(tmp_path / "other")
    waiting = other.start(*corpus, ranks=1, plain=True)
    scenario.jobs.append(waiting)
    told = f"for process {builder.pids()[0]} of this machine, which builds indices and holds the"
    scenario.ends(waiting, [1], told, within=LIMIT_SECONDS + 20)
    scenario.run.release()
    assert builder.end(30.0) == [0]
    goes_on(scenario, other, corpus, 1)
    is_like(other, scenario.run)


def goes_on(scenario: Scenario, run: Run, corpus: list[object], step: int) -> None:
    """The next start begins with this step and trains to the end."""
    scenario.strikes()
    again = run.start(*corpus, ranks=1, plain=True)
    scenario.jobs.append(again)
    scenario.next_step(again, step)
    assert again.end(30.0) == [0]


def undisturbed(folder: Path, corpus: list[object]) -> Run:
    run = Run(folder / "undisturbed")
    assert run.start(*corpus, ranks=1, plain=True).end(60.0) == [0]
    return run


def is_like(run: Run, other: Run) -> None:
    assert run.steps() == other.steps()
    assert run.final_sums() == other.final_sums()
