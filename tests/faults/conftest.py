"""The scenarios' runs: each in its folder, ended with its test, judged against an undisturbed one."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.faults.job import ITERATIONS, Job, Run

# Where the record of a run of all scenarios is written, if anywhere.
RECORD = os.environ.get("FAULTS_RECORD")


@dataclass(slots=True)
class Scenario:
    """A fault in a training: what happened, and how long it took; recorded if all was right."""

    name: str
    run: Run
    undisturbed: Run
    jobs: list[Job] = field(default_factory=list)
    end: str = ""
    seconds_to_end: float | None = None
    seconds_to_step: float | None = None
    _fault_at: float = 0.0

    def start(self, *flags: object, **how: Any) -> Job:
        self.jobs.append(self.run.start(*flags, **how))
        return self.jobs[-1]

    def strikes(self) -> None:
        """The fault comes now."""
        self._fault_at = time.monotonic()

    def ends(
        self, job: Job, statuses: Sequence[int], told: str | None = None, *, within: float
    ) -> None:
        """The job ends with these statuses and a single line that says `told`, without traceback."""
        found = job.end(within)
        self.seconds_to_end = time.monotonic() - self._fault_at
        assert found == list(statuses), job.text()[-6000:]
        if told is not None:
            errors = set(job.errors())
            assert len(errors) == 1, job.text()[-6000:]
            assert told in errors.pop(), job.text()[-6000:]
            assert "Traceback (most recent call last)" not in own_text(job), job.text()
        self.end = f"status {', '.join(map(str, dict.fromkeys(found)))}"

    def resumes(self, *saved: int, **how: Any) -> None:
        """One of these iterations is saved, and the next start ends like the undisturbed run."""
        found = self.run.saved()
        assert found in saved
        self.strikes()
        again = self.start(**how)
        if found < ITERATIONS:
            again.wait_for_step(found + 1)
            self.seconds_to_step = time.monotonic() - self._fault_at
        assert again.end(60.0) == [0] * len(again.scripts), again.text()[-6000:]
        self.is_whole()

    def is_whole(self) -> None:
        """The run has trained to its end, bit for bit as the undisturbed one."""
        assert self.run.steps() == self.undisturbed.steps()
        assert self.run.saved() == self.undisturbed.saved()
        assert self.run.final_sums() == self.undisturbed.final_sums()


def own_text(job: Job) -> str:
    """What the ranks have printed; torchrun's agent shows a traceback of its own."""
    return job.text().partition("torch/distributed/")[0] if len(job.scripts) == 1 else job.text()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("undisturbed"))
    job = run.start()
    assert job.end(120.0) == [0], job.text()[-6000:]
    return run


@pytest.fixture
def scenario(
    request: pytest.FixtureRequest, tmp_path: Path, undisturbed: Run
) -> Iterator[Scenario]:
    made = Scenario(request.node.name, Run(tmp_path), undisturbed)
    yield made
    for job in made.jobs:
        job.kill()
