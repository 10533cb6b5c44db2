"""progress.txt: Megatron's lines, throughput over several jobs, and a failing disk."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from paro.report.log import Log
from paro.report.progress import PROGRESS_FILE, ProgressFile
from tests.paro.report.test_log_line import FACTS

NOON = datetime(2026, 3, 1, 12)
# 4 ranks; 128 tokens per sample; a TFLOP per token: 128 TFLOP per sample.
LARGE = replace(FACTS, flops_per_token=1e12)


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> datetime:
        return self.now

    def turn(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


def begin(folder: Path, clock: Clock, *, samples: int = 0, ranks: int = 4) -> ProgressFile:
    facts = replace(LARGE, world_size=ranks)
    job = {"start_samples": samples, "job_id": "77", "clock": clock}
    return ProgressFile(str(folder), facts, Log(rank=0, world_size=ranks), **job)  # type: ignore[arg-type]


def lines(folder: Path) -> list[list[str]]:
    text = (folder / PROGRESS_FILE).read_text()
    return [line.split("\t") for line in text.splitlines()]


def test_lines_are_megatrons(tmp_path: Path) -> None:
    clock = Clock()
    progress = begin(tmp_path / "new", clock)
    clock.turn(64.0)
    progress.saved(10, 40)
    assert (tmp_path / "new" / PROGRESS_FILE).read_text() == (
        "2026-03-01 12:00:00\tJob ID: 77\t# GPUs: 4\tStarting job\n"
        "2026-03-01 12:01:04\tJob ID: 77\t# GPUs: 4\tSaved checkpoint\tIteration: 10\t"
        "Job throughput: 20.0 TFLOP/s/GPU\tCumulative throughput: 20.0 TFLOP/s/GPU\t"
        "Floating-point operations: 5.12e+15\tTokens (in billions): 0.00\n"
    )


def test_a_save_beside_the_training_has_two_lines(tmp_path: Path) -> None:
    clock = Clock()
    progress = begin(tmp_path, clock)
    clock.turn(1.0)
    progress.saved(10, 40, is_async=True)
    clock.turn(1.0)
    progress.finished(10)
    assert [line[3:5] for line in lines(tmp_path)[1:]] == [
        ["Saving async checkpoint", "Iteration: 10"],
        ["Saved async checkpoint", "Iteration: 10"],
    ]


def test_pauses_between_jobs_on_as_many_ranks_count_and_other_numbers_of_ranks_do_not(
    tmp_path: Path,
) -> None:
    clock = Clock()
    begin(tmp_path, clock, ranks=8).saved(10, 1000)
    with (tmp_path / PROGRESS_FILE).open("a") as stream:
        stream.write("half a li")  # of a job that was killed
        stream.write("\n")
    begin(tmp_path, clock, samples=1000)
    clock.turn(64.0)
    progress = begin(tmp_path, clock, samples=1000)
    clock.turn(64.0)
    progress.saved(20, 1040)
    fields = lines(tmp_path)[-1]
    assert fields[5:7] == [
        "Job throughput: 20.0 TFLOP/s/GPU",
        "Cumulative throughput: 10.0 TFLOP/s/GPU",
    ]


def test_only_the_first_rank_writes(tmp_path: Path) -> None:
    log = Log(rank=1, world_size=2)
    ProgressFile(str(tmp_path), LARGE, log, start_samples=0, job_id="").saved(1, 1)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fails_costs_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / PROGRESS_FILE).mkdir()
    progress = begin(tmp_path, Clock())
    progress.saved(1, 1)
    progress.finished(1)
    assert capsys.readouterr().out.count("--log-progress is left out from here on: ") == 1
