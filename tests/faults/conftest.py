"""Scenarios: a run in a folder of its own, which a fault strikes, beside an undisturbed one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.faults.job import ITERATIONS, Job, Pause, Point, Run


@dataclass(slots=True)
class Scenario:
    """A fault in a training, and how long things took after it."""

    name: str
    run: Run
    undisturbed: Callable[..., Run]  # by the number of ranks, and flags
    ranks: int = 2
    plain: bool = False  # without torchrun
    flags: tuple[object, ...] = ()  # of every start
    jobs: list[Job] = field(default_factory=list)
    end: str = ""
    seconds_to_end: float = 0.0
    seconds_to_step: float | None = None  # from the next start to its first step; None: no step
    _at: float = 0.0

    def start(self, *flags: object, **how: Any) -> Job:
        how = {"ranks": self.ranks, "plain": self.plain, **how}
        self.jobs.append(self.run.start(*self.flags, *flags, **how))
        return self.jobs[-1]

    def paused(self, target: Point, call: int, *flags: object, at: int = 0, **how: Any) -> Job:
        """A job of which `at` ranks (0: all) are paused in a call; the fault strikes now."""
        pause = Pause(self.run.root, target, call, how.pop("only", None))
        before = [replace(pause, first=each) for each in how.pop("before", [])] or [pause]
        job = self.start(*flags, before=before, **how)
        job.wait_for(lambda: pause.ranks() == (at or self.ranks))
        self.strikes()
        return job

    def strikes(self) -> None:
        self._at = time.monotonic()

    def ended(self, what: str) -> None:
        self.seconds_to_end = time.monotonic() - self._at
        self.end = what

    def ends(
        self, job: Job, statuses: Sequence[int], message: str | None = None, *, within: float
    ) -> None:
        """The job ends with these statuses, and one line without a traceback that says `told`."""
        found = job.end(within)
        self.ended(f"status {', '.join(map(str, dict.fromkeys(found)))}")
        assert found == list(statuses), job.tail()
        if message is not None:
            lines = set(job.errors())
            assert [message in line for line in lines] == [True], job.tail()
            has_traceback = "Traceback (most recent call last)" in job.own_text()
            assert not has_traceback, job.tail()
            self.end += f': "{message.strip()}"'

    def continues(self, again: Job, saved: int, *, within: float = 60.0) -> None:
        """A later start, after iteration `saved`, ends like the undisturbed run."""
        if saved < ITERATIONS:
            again.wait_for(lambda: again.steps_printed() > saved, within)
            self.seconds_to_step = time.monotonic() - self._at
        assert again.end(60.0) == [0] * len(again.scripts), again.tail()
        self.is_whole()

    def resumes(self, *saved: int, **how: Any) -> None:
        """One of these iterations is saved, and the next start ends like the undisturbed run."""
        found = self.run.saved()
        assert found in saved
        self.strikes()
        self.continues(self.start(**how), found)

    def is_replaced(self, first: Job, message: str, *, started: float, ended: float) -> None:
        """An owner of --save stops until another start has ended; woken, it ends saying `told`."""
        for pid in first.tree():
            os.kill(pid, signal.SIGSTOP)
        self.continues(self.start(), 3, within=started)
        self.run.release()
        for pid in first.tree():
            os.kill(pid, signal.SIGCONT)
        self.strikes()
        self.ends(first, [1], message, within=ended)
        self.is_whole()

    def is_whole(self) -> None:
        """The run has trained to its end, bit for bit as the undisturbed one."""
        assert self.run.steps() == self.undisturbed(self.ranks, *self.flags).steps()
        self.is_saved_whole()

    def is_saved_whole(self) -> None:
        undisturbed = self.undisturbed(self.ranks, *self.flags)
        assert self.run.saved() == undisturbed.saved()
        assert self.run.final_sums() == undisturbed.final_sums()

    def outcome(self) -> dict[str, Any]:
        """How it ended, as it was expected to."""
        return {
            "fault": self.name.partition("[")[0],
            "where": self.name.partition("[")[2].rstrip("]"),
            "end": self.end.replace(f"{self.run.root}/", ""),
            "seconds_to_end": round(self.seconds_to_end, 2),
            "seconds_to_step": self.seconds_to_step and round(self.seconds_to_step, 2),
        }


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Function) -> Iterator[None]:
    """Add to a passed test's report how its scenario ended."""
    yield
    if "scenario" in item.funcargs:
        item.user_properties.append(("fault", item.funcargs["scenario"].outcome()))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    @cache
    def of(ranks: int, *flags: object) -> Run:
        run = Run(tmp_path_factory.mktemp("undisturbed"))
        job = run.start(*flags, ranks=ranks)
        assert job.end(120.0) == [0], job.tail()
        return run

    return of


@pytest.fixture
def scenario(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    undisturbed: Callable[..., Run],
) -> Iterator[Scenario]:
    name = request.node.name.removeprefix("test_").replace("_", " ")
    made = Scenario(name, Run(tmp_path), undisturbed)
    yield made
    for job in made.jobs:
        job.kill()
