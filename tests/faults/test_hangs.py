"""What never comes: a batch, a lock, an answer of a disk or of another rank. The run ends."""

from __future__ import annotations

import os
import signal

import pytest

from tests.faults.conftest import Scenario
from tests.faults.job import ITERATIONS, LIMIT_SECONDS, Point
from tests.helpers.processes import children

pytestmark = [pytest.mark.verify, pytest.mark.ranks]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stopped_reader(scenario: Scenario, ranks: int) -> None:
    """A process that reads ahead stops while it hands a batch over, where torch has no limit."""
    scenario.ranks = ranks
    job = scenario.paused(Point.STEP, 5, "--num-workers", 1)
    for server in children(job.pids()[-1]):
        for reader in children(server):
            os.kill(reader, signal.SIGSTOP)
    scenario.run.release()
    told = None if ranks == 1 else "no connection to another rank, which has ended, hangs or is"
    scenario.ends(job, [1], told, within=LIMIT_SECONDS + 20)
    assert ranks > 1 or "s while training, after iteration 4: the run ends" in job.text()
    scenario.resumes(3)


@pytest.mark.parametrize(
    ("target", "call", "phase", "saved"),
    [
        (Point.READ_MOCK_SAMPLE, 40, "training, after iteration 4", 3),
        (Point.CLAIM_FOLDER, 1, "claiming the folder of --save", 0),
        (Point.WRITE_DATA, 2, "saving, after iteration 6", 3),
        (Point.CLOSE_REPORT, 1, "ending the run, after iteration 12", ITERATIONS),
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
    job = scenario.paused(Point.BARRIER, 1, only=1, at=1)
    told = "at the end, while waiting for the others: "
    scenario.ends(job, [1], told, within=LIMIT_SECONDS + 20)
    scenario.is_whole()
