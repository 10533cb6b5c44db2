"""Signals in every phase of a run: it ends, nothing is lost, and the next start continues."""

from __future__ import annotations

import signal

import pytest

from tests.faults.conftest import Scenario
from tests.faults.job import ITERATIONS, Point
from tests.faults.places import no_reader

pytestmark = [pytest.mark.verify, pytest.mark.ranks]

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
    """As Ctrl-C ends `tee` too: the run saves all the same, and says so on standard error."""
    job = scenario.paused(Point.MICRO_BATCH, 30, "--exit-signal-handler", before=[no_reader])
    job.signal(signal.SIGINT, 1)
    scenario.run.release()
    scenario.ends(job, [0], within=40.0)
    assert "the same command continues from there" in job.text()
    scenario.resumes(8)
