"""What never comes: a batch, a lock, an answer of a disk or of another rank. The run ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.end_to_end.test_training import write_corpus
from tests.faults.conftest import Scenario
from tests.faults.job import ITERATIONS, LIMIT_SECONDS, Run, children

pytestmark = [pytest.mark.verify, pytest.mark.ranks]

READERS = "waited 60 s for a batch from 1 processes that read ahead"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stopped_reader(scenario: Scenario, ranks: int) -> None:
    scenario.ranks = ranks
    job = scenario.paused("paro.training.loop:train_step", 5, "--num-workers", 1)
    for server in children(job.pids()[-1]):
        for reader in children(server):
            os.kill(reader, signal.SIGSTOP)
    scenario.run.release()
    scenario.ends(job, [1], READERS, within=LIMIT_SECONDS + 20)
    scenario.resumes(3)


@pytest.mark.parametrize(
    ("target", "call", "phase", "saved"),
    [
        ("data.mock:MockDataset.__getitem__", 40, "training, after iteration 4", 3),
        ("paro.checkpoint.lease:Contender.attempt", 1, "claiming the folder of --save", 0),
        ("paro.checkpoint.storage:BoundedWriter.write_data", 2, "saving, after iteration 6", 3),
        ("paro.report.report:Report.close", 1, "ending the run, after iteration 12", ITERATIONS),
    ],
    ids=["data", "claim", "save", "end"],
)
def test_a_dead_disk(scenario: Scenario, target: str, call: int, phase: str, saved: int) -> None:
    """A single process that never returns from a call."""
    scenario.ranks = 1
    job = scenario.paused(target, call)
    scenario.ends(job, [1], within=LIMIT_SECONDS + 20)
    (line,) = [text for text in job.text().splitlines() if "error: no progress for " in text]
    assert f"s while {phase}" in line
    scenario.resumes(saved)


def test_a_rank_stays_away_at_the_end(scenario: Scenario) -> None:
    """All is saved; the other rank says where it has waited."""
    barrier = "paro.distributed.control:Control.barrier"
    job = scenario.paused(barrier, 1, only=1, at=1)
    told = "at the end, while waiting for the others: "
    scenario.ends(job, [1], told, within=LIMIT_SECONDS + 20)
    scenario.is_whole()


def test_a_stuck_builder_of_indices(scenario: Scenario, tmp_path: Path) -> None:
    """Another run holds the lock of the corpus."""
    scenario.ranks = 1
    write_corpus(tmp_path / "corpus", list(range(100)) * 100)
    data = ["--data-path", tmp_path / "corpus", "--split", "8,1,1"]
    builder = scenario.paused("data.index_cache:build_order", 1, *data, plain=True)
    other = Run(tmp_path / "other")
    waiting = other.start(*data, ranks=1, plain=True)
    scenario.jobs.append(waiting)
    told = f"for process {builder.pids()[0]} of this machine, which builds indices and holds the"
    scenario.ends(waiting, [1], told, within=LIMIT_SECONDS + 20)
    scenario.run.release()
    assert builder.end(30.0) == [0]
    assert other.start(*data, ranks=1, plain=True).end(30.0) == [0]
    assert other.steps() == scenario.run.steps()
    assert other.final_sums() == scenario.run.final_sums()
