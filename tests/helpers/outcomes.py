"""What pytest is told of tests: files of outcomes, and processes and time that are not allowed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import date
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one test: a line of the file."""

    test: str
    outcome: str  # passed, failed or skipped
    seconds: float
    commit: str  # abbreviated; with a + if files had been changed
    date: str  # as in 2026-11-29
    properties: dict[str, Any] = field(default_factory=dict)  # what the test tells of itself


class Outcomes:
    """A pytest plugin that appends outcomes to a file and, if asked, leaves out what has passed."""

    def __init__(self, path: Path, commit: str, *, continues: bool, writes: bool) -> None:
        self._path, self._commit = path, commit
        self._continues, self._writes = continues, writes
        path.parent.mkdir(parents=True, exist_ok=True)
        if writes and not continues:
            path.unlink(missing_ok=True)

    def read(self) -> dict[str, Outcome]:
        """Read the last outcome of every test."""
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else ()
        last = (Outcome(**json.loads(line)) for line in lines)
        return {one.test: one for one in last}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        passed = {test for test, last in self.read().items() if last.outcome == "passed"}
        if self._continues:
            config.hook.pytest_deselected(items=[one for one in items if one.nodeid in passed])
            items[:] = [one for one in items if one.nodeid not in passed]

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        # That none is left to run is no failure once all have passed.
        if self._continues and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.read():
            session.exitstatus = pytest.ExitCode.OK

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not self._writes or (report.when != "call" and report.passed):
            return
        outcome = Outcome(
            test=report.nodeid,
            outcome=report.outcome,
            seconds=round(report.duration, 2),
            commit=self._commit,
            date=date.today().isoformat(),
            properties=dict(report.user_properties),
        )
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in summary(self.read().values()):
            terminalreporter.line(line)


def summary(outcomes: Iterable[Outcome]) -> list[str]:
    """Say how many tests have which outcome, and at which commits, over all parts of a run."""
    last = [*outcomes]
    hours = sum(one.seconds for one in last) / 3600
    kinds = Counter((one.outcome, one.commit, one.date) for one in last)
    lines = [
        f"{count} {outcome} at {commit} on {day}"
        for (outcome, commit, day), count in sorted(kinds.items())
    ]
    return [f"all parts of this run: {len(last)} tests, {hours:.1f} hours of tests", *lines]


def present_commit() -> str:
    """Return the abbreviated commit of the repository, with a + if files have been changed."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=8", "--dirty=+"]
    described = subprocess.run(command, capture_output=True, text=True, check=False)
    return described.stdout.strip() or "no commit"


# Tests with one of these marks may start processes.
MAY_START = ("ranks", "process", "gpu", "root", "browser", "verify")
# What Python's own audit calls the ways to start one; multiprocessing's are not among them.
_EVENTS = {"subprocess.Popen", "os.system", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec"}
# What libraries start by themselves: matplotlib lists the fonts when it is first imported.
_LIBRARIES_OWN = ("fc-list",)

_FLOPS = 3e11  # of a core, in fp32
_SIZE = 1024

_pure_test: str | None = None  # the one that runs now


class ProcessStartedError(AssertionError):
    """A test without a mark that allows it started a process."""


def _refuse(what: str) -> None:
    global _pure_test
    if _pure_test is not None:
        name, _pure_test = _pure_test, None  # what reports the failure may start processes
        raise ProcessStartedError(
            f"{name} starts a process ({what}) without a mark: give it @pytest.mark.process, "
            "or ranks if the processes talk to each other"
        )


def install() -> None:
    """Watches this process from now on: an audit hook cannot be removed."""

    def audit(event: str, details: tuple[Any, ...]) -> None:
        if event in _EVENTS and not (event == "subprocess.Popen" and details[0] in _LIBRARIES_OWN):
            _refuse(event)

    start = BaseProcess.start

    def watched(process: BaseProcess) -> None:
        _refuse(f"multiprocessing, {process.name}")
        start(process)

    sys.addaudithook(audit)
    BaseProcess.start = watched  # type: ignore[method-assign, assignment]


@contextmanager
def held(item: pytest.Item) -> Iterator[None]:
    """Refuses processes while a phase of a test runs that has no mark for them."""
    global _pure_test
    before = _pure_test
    _pure_test = None if any(map(item.get_closest_marker, MAY_START)) else item.nodeid
    try:
        yield
    finally:
        _pure_test = before


@contextmanager
def timed(item: pytest.Item, limit: float) -> Iterator[None]:
    """Fails a test whose call takes more processor time than `limit` seconds, or gives a reason.

    The limit is meant for a machine of `_FLOPS`; one that is slower, or is so now, has more.
    """
    began = time.process_time()
    yield
    taken = time.process_time() - began
    if taken <= limit or item.get_closest_marker("slow") is not None:
        return
    allowed = limit * slowness()
    if taken > allowed:
        pytest.fail(
            f"took {taken:.1f} s of processor time, more than {allowed:.2g} s: make it smaller, or "
            'give it @pytest.mark.slow("why")',
            pytrace=False,
        )


def slowness() -> float:
    """How much slower than `_FLOPS` a core multiplies matrices now; at least 1."""
    import torch  # here, because conftest.py says first how many threads it takes

    matrix = torch.ones(_SIZE, _SIZE)
    taken = math.inf
    for _ in range(3):
        began = time.process_time()
        torch.mm(matrix, matrix)
        taken = min(taken, time.process_time() - began)
    return max(1.0, taken * _FLOPS / (2 * _SIZE**3))
