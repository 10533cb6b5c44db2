"""Ranks that get signals, differ, stop or never come: a run ends in one line, and continues."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults.conftest import Scenario
from tests.faults.job import ITERATIONS, LIMIT_SECONDS, Point, no_reader, two_nodes
from tests.helpers.scripts import children, lives

pytestmark = [pytest.mark.verify, pytest.mark.ranks]

LOST = "no connection to another rank, which has ended, hangs or is cut off: "


def other_code() -> None:
    """For `before`: this rank runs another version of the code."""
    import paro.config.record as settings

    settings.code_version = lambda: "0123456789ab"


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ("--lr 0.001", "--lr must be the same on all ranks, and is 0.003 on rank 0, 0.001 on"),
        ("--seed 5", "--seed must be the same on all ranks, and is 1234 on rank 0, 5 on rank 1"),
        ("--micro-batch-size 2", "--micro-batch-size must be the same on all ranks, and is 1 on"),
        ("--bf16", "--bf16 must be the same on all ranks, and is not given on rank 0, --bf16 on"),
        ("--lr inf", "rank 1: argument --lr: "),
        ("--tensorboard-dir board", "--tensorboard-dir must be the same on all ranks, and is not"),
    ],
)
def test_other_flags(scenario: Scenario, own: str, message: str) -> None:
    scenario.strikes()
    job = scenario.start(plain=True, own=[[], own.split()])
    scenario.ends(job, [2, 2], message, within=15.0)
    scenario.resumes(0)


def test_other_code(scenario: Scenario) -> None:
    scenario.strikes()
    job = scenario.start(plain=True, before=[time.time, other_code])
    scenario.ends(job, [2, 2], "the code (a hash of paro, model and data) must be", within=15.0)
    scenario.resumes(0)


def test_other_paths_are_no_fault(scenario: Scenario, tmp_path: Path) -> None:
    own = [["--tensorboard-dir", tmp_path / name] for name in ("a", "b")]
    scenario.strikes()
    scenario.ends(scenario.start(plain=True, own=own), [0, 0], within=60.0)
    scenario.is_whole()


def test_a_rank_never_starts(scenario: Scenario) -> None:
    scenario.strikes()
    job = scenario.start(plain=True, ranks=1, env={"WORLD_SIZE": "2"})
    scenario.ends(job, [1], "rank 1 did not come within 0:01:00", within=LIMIT_SECONDS + 15)
    scenario.resumes(0)


def test_a_stopped_rank(scenario: Scenario) -> None:
    """Without a launcher nobody ends it: it ends by itself once it is woken."""
    job = scenario.paused(Point.MICRO_BATCH, 30, plain=True)
    job.signal(signal.SIGSTOP, 1)
    scenario.run.release()
    waiting, stopped = job.scripts
    assert waiting.wait(LIMIT_SECONDS + 15) == 1, job.tail()
    assert lives(stopped.pid)
    job.signal(signal.SIGCONT, 1)
    scenario.ends(job, [1, 1], LOST, within=15.0)
    scenario.resumes(6)


def test_a_stopped_rank_of_torchrun(scenario: Scenario) -> None:
    """The agent kills it 30 s after the others have ended."""
    job = scenario.paused(Point.MICRO_BATCH, 30)
    job.signal(signal.SIGSTOP, 1)
    scenario.run.release()
    scenario.ends(job, [1], LOST, within=LIMIT_SECONDS + 45)
    scenario.resumes(6)


@pytest.mark.root
@pytest.mark.parametrize(
    ("down", "statuses"),
    [(3.0, [0, 0]), (15.0, [0, 0]), (None, [1, 1])],
    ids=["3 s", "15 s", "for good"],
)
def test_link_down(scenario: Scenario, down: float | None, statuses: Sequence[int]) -> None:
    """TCP repeats what was lost: a link that comes back in time is no fault."""
    with two_nodes("faults") as nodes:
        env = {"MASTER_ADDR": "10.78.0.1", "GLOO_SOCKET_IFNAME": "nic"}
        # In iteration 4.
        job = scenario.paused(Point.MICRO_BATCH, 14, plain=True, before=nodes, env=env)
        nodes[0].set_link("down")
        scenario.run.release()
        if down is not None:
            time.sleep(down)
            nodes[0].set_link("up")
        message = None if down else LOST
        scenario.ends(job, statuses, message, within=LIMIT_SECONDS + 30)
    if down is None:
        scenario.resumes(3)
    else:
        scenario.is_whole()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stopped_reader(scenario: Scenario, ranks: int) -> None:
    """A process that reads ahead stops while it hands a batch over, where torch has no limit."""
    scenario.ranks = ranks
    job = scenario.paused(Point.STEP, 5, "--num-workers", 1)
    for reader in children(job.pids()[-1]):
        os.kill(reader, signal.SIGSTOP)
    scenario.run.release()
    message = None if ranks == 1 else "no connection to another rank, which has ended, hangs or is"
    scenario.ends(job, [1], message, within=LIMIT_SECONDS + 20)
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
    message = "at the end, while waiting for the others: "
    scenario.ends(job, [1], message, within=LIMIT_SECONDS + 20)
    scenario.is_whole()


# Where a rank is paused, in which call, more flags, and the iteration that is saved by then.
PHASES = {
    "before the rendezvous": (Point.RENDEZVOUS, 1, "", 0),
    "building": (Point.BUILDING, 1, "", 0),
    "a step": (Point.MICRO_BATCH, 30, "", 6),
    "evaluating": (Point.EVALUATE, 1, "", 3),
    "saving": (Point.WRITE_FILES, 2, "", 3),
    "saving, async": (Point.WRITE_FILES, 2, "--async-save", 3),
    "the last barrier": (Point.BARRIER, 1, "", ITERATIONS),
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGKILL"])
def test_signal_to_torchrun(scenario: Scenario, name: str, phase: str) -> None:
    """Also where the agent is killed, no rank outlives it."""
    strike(scenario, name, phase, rank=None, status=-9 if name == "SIGKILL" else 1)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGKILL"])
def test_signal_to_a_rank(scenario: Scenario, name: str, phase: str) -> None:
    strike(scenario, name, phase, rank=1, status=1)


def strike(scenario: Scenario, name: str, phase: str, *, rank: int | None, status: int) -> None:
    target, call, flags, saved = PHASES[phase]
    job = scenario.paused(target, call, *flags.split())
    job.signal(getattr(signal, name), rank)
    scenario.ends(job, [status], within=40.0)
    scenario.resumes(saved)


@pytest.mark.parametrize(
    ("phase", "saved"),
    [
        ("a step", [8]),
        ("evaluating", [6]),  # finishes the step after it
        ("saving", [7]),
        ("saving, async", [7, 8, 9]),  # further steps run during the save, up to the next one
        ("the last barrier", [ITERATIONS]),
    ],
)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_signal_with_a_handler(scenario: Scenario, name: str, phase: str, saved: list[int]) -> None:
    """With --exit-signal-handler a rank that is asked to end finishes the step, and all save."""
    target, call, flags, _ = PHASES[phase]
    handled = ["--exit-signal-handler", "--exit-signal", "SIGUSR1"]
    job = scenario.paused(target, call, *flags.split(), *handled)
    job.signal(getattr(signal, name), 1)
    scenario.run.release()
    scenario.ends(job, [0], within=40.0)
    assert ("the same command continues from there" in job.text()) == (saved != [ITERATIONS])
    scenario.resumes(*saved)


def test_signal_after_the_reader_of_the_log(scenario: Scenario) -> None:
    """Ctrl-C also ends the `tee` of a pipe: the run saves, and says so on standard error."""
    job = scenario.paused(Point.MICRO_BATCH, 30, "--exit-signal-handler", before=[no_reader])
    job.signal(signal.SIGINT, 1)
    scenario.run.release()
    scenario.ends(job, [0], within=40.0)
    assert "the same command continues from there" in job.text()
    scenario.resumes(8)
