"""A file of tests' outcomes, from which an interrupted run of all studies is continued."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

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
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    return told.stdout.strip() or "no commit"
