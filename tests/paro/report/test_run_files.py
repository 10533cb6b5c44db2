"""The files of a run after a resume, Megatron's lines of progress.txt, and what a new run finds."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from paro.report import run_files
from paro.report.config import run_record_path
from paro.report.earlier import earlier_file, next_number
from paro.report.log import Log
from paro.report.record import Metrics, Validation, summarize
from paro.report.run_files import PROGRESS_FILE, MetricsFile, ProgressFile, RunRecord
from tests.helpers.refusals import read_lines, refused
from tests.paro.report.test_report import FACTS, LARGER, record

LINE = replace(summarize([record(1)], FACTS, peak_memory_bytes=10**9), lm_loss=0.1 + 0.2)


def opened(path: Path, start_iteration: int) -> tuple[MetricsFile, list[str]]:
    """The file of a run, and what it says of an existing one."""
    said: list[str] = []
    log = Log(write=said.append)
    return MetricsFile(str(path), log, lambda: True, start_iteration=start_iteration), said


def write(path: Path, iterations: range, start_iteration: int, *, loss: float = 1.0) -> list[str]:
    metrics_file, said = opened(path, start_iteration)
    for iteration in iterations:
        metrics_file.write(replace(LINE, iteration=iteration, lm_loss=loss))
    metrics_file.close()
    return said


def test_numbers_are_whole_or_null_and_lines_are_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    metrics_file, _ = opened(path, 0)
    metrics_file.write(LINE)
    of_groups: dict[str, Any] = {
        "group_lm_losses": (2.5, None, math.inf),
        "outer_grad_cosine": math.nan,
    }
    metrics_file.write(replace(LINE, lm_loss=math.nan, grad_norm=math.inf, **of_groups))
    whole, null = read_lines(path)
    assert list(whole) == [field.name for field in fields(Metrics)]
    assert whole["lm_loss"] == 0.1 + 0.2
    assert null["lm_loss"] is null["grad_norm"] is null["outer_grad_cosine"] is None
    assert null["group_lm_losses"] == [2.5, None, None]


@pytest.mark.parametrize(
    ("rest", "is_cut"),
    [
        (b'{"iteration": 4, "consumed_sam', True),
        (b'{"iteration": 4, "x": "h\xc3', True),
        (b"\0\0", True),  # of a machine that lost power
        (json.dumps({"iteration": 3, "only": "its end of line is missing"}).encode(), False),
    ],
)
def test_a_line_cut_short_by_a_crash_goes(tmp_path: Path, rest: bytes, is_cut: bool) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 3), 0)
    path.write_bytes(path.read_bytes() + rest)
    said = write(path, range(4, 5), 3)
    kept = [1, 2] if is_cut else [1, 2, 3]
    assert [line["iteration"] for line in read_lines(path)] == [*kept, 4]
    assert [f"--metrics-file {path}: the last line is cut short" in text for text in said] == [
        True
    ] * is_cut


def test_what_earlier_starts_logged_is_kept_with_their_records(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    starts = [(0, 9), (0, 3), (2, 6), (1, 2), (0, 2)]  # the last iteration before, and of it
    for number, (begin, end) in enumerate(starts):
        said = write(path, range(begin + 1, end + 1), begin, loss=number)
        assert [path.name in text and "is in" in text for text in said] == [True] * (number > 0)
        run_record_path(path).write_text(str(number))
    kept = [path, *(Path(f"{path}.earlier_{number}") for number in range(1, 5))]
    found = {
        each.name.removeprefix(path.name): [
            (line["iteration"], line["lm_loss"]) for line in read_lines(each)
        ]
        for each in kept
    }
    assert found == {
        "": [(1, 4), (2, 4)],
        ".earlier_1": [(iteration, 0) for iteration in range(1, 10)],
        ".earlier_2": [(3, 1)],
        ".earlier_3": [(2, 1), (3, 2), (4, 2), (5, 2), (6, 2)],
        ".earlier_4": [(1, 1), (2, 3)],
    }
    assert [run_record_path(each).read_text() for each in kept] == ["4", "0", "1", "2", "3"]
    assert len([*tmp_path.iterdir()]) == 10
    alone = run_record_path(tmp_path / "b.jsonl")
    alone.write_text("of metrics that somebody has moved")
    assert "b.jsonl.earlier_1.run.json" in "".join(write(tmp_path / "b.jsonl", range(1, 2), 0))
    kept_alone = tmp_path / "b.jsonl.earlier_1.run.json"
    assert kept_alone.read_text() == "of metrics that somebody has moved"
    alone = run_record_path(tmp_path / "c.jsonl")
    alone.symlink_to("/dev/null")  # a copy of /dev/zero would fill the disk
    refused(lambda: opened(tmp_path / "c.jsonl", 0), f"{alone} is no regular file")


@pytest.mark.parametrize(
    "text", ["[1, 2]\n", '{"step": 1}\n', "no newline", '{"iteration": 1}\n{"itera\n']
)
def test_a_file_that_is_something_else_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    number = text.count("\n") or 1
    refused(lambda: opened(path, 0), f"--metrics-file {path}, line {number} ... another name")
    assert path.read_text() == text
    below = path / "m.jsonl"
    refused(lambda: opened(below, 0), f"--metrics-file {below} cannot be written")


CPU = torch.device("cpu")


def test_a_resumed_run_adds_its_start_and_repeats_no_evaluation(tmp_path: Path) -> None:
    path = run_record_path(tmp_path / "metrics.jsonl")
    assert path.name == "metrics.jsonl.run.json"
    first = RunRecord(path, Log(), lambda: True, start_iteration=0)
    first.start({"lr": 0.1, "save": Path("x")}, FACTS, CPU)
    for iteration in (10, 20):
        made = Validation(iteration, 8 * iteration, 1.0, "all", 0.5, ema_loss=0.75)
        first.validation(made)
    second = RunRecord(path, Log(), lambda: True, start_iteration=10)
    second.start({"lr": 0.2}, FACTS, CPU)
    second.validation(Validation(20, 160, math.nan, "all", math.nan))
    written = json.loads(path.read_text())
    assert [start["iteration"] for start in written["starts"]] == [0, 10]
    assert [start["arguments"]["lr"] for start in written["starts"]] == [0.1, 0.2]
    assert [[*at.values()] for at in written["validations"]] == [
        [10, "validation", 1.0, 0.5, 0.75],
        [20, "validation", None, None, None],
    ]
    assert written["starts"][0]["facts"]["flops_per_token"] == FACTS.flops_per_token
    assert written["starts"][0]["environment"]["torch"] == torch.__version__


def test_a_fresh_run_starts_a_record_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "m.run.json"
    path.write_text("{ damaged")
    resume = partial(RunRecord, path, Log(), lambda: True, start_iteration=5)
    refused(resume, "m.run.json is not valid JSON ... remove it to go on")
    RunRecord(path, Log(), lambda: True, start_iteration=0).start({}, FACTS, CPU)
    assert len(json.loads(path.read_text())["starts"]) == 1
    path.write_text('{"starts": [{"iteration": "x"}]}')
    refused(resume, "m.run.json: starts[0].iteration: 'x' is of the wrong")


NOON, LATER = datetime(2026, 3, 1, 12), timedelta(seconds=64)
# 4 ranks; 128 tokens per sample; a TFLOP per token: 128 TFLOP per sample.
LARGE = replace(LARGER, flops_per_token=1e12)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """The time of the progress file."""
    now = Mock(return_value=NOON)
    monkeypatch.setattr(run_files, "datetime", Mock(wraps=datetime, now=now))
    return now


def begin(folder: Path, *, samples: int = 0, ranks: int = 4) -> ProgressFile:
    facts, log = replace(LARGE, world_size=ranks), Log(rank=0, world_size=ranks)
    return ProgressFile(str(folder), facts, log, start_samples=samples, job_id="77")


def lines(folder: Path) -> list[list[str]]:
    text = (folder / PROGRESS_FILE).read_text()
    return [line.split("\t") for line in text.splitlines()]


def test_lines_are_megatrons(tmp_path: Path, clock: Mock) -> None:
    progress = begin(tmp_path / "new")
    clock.return_value += LATER
    progress.saved(10, 40)
    assert (tmp_path / "new" / PROGRESS_FILE).read_text() == (
        "2026-03-01 12:00:00\tJob ID: 77\t# GPUs: 4\tStarting job\n"
        "2026-03-01 12:01:04\tJob ID: 77\t# GPUs: 4\tSaved checkpoint\tIteration: 10\t"
        "Job throughput: 20.0 TFLOP/s/GPU\tCumulative throughput: 20.0 TFLOP/s/GPU\t"
        "Floating-point operations: 5.12e+15\tTokens (in billions): 0.00\n"
    )
    progress.saved(20, 40, is_async=True)
    progress.finished(20)
    saves = [line[3:5] for line in lines(tmp_path / "new")[2:]]
    assert saves == [[f"{verb} async checkpoint", "Iteration: 20"] for verb in ("Saving", "Saved")]


def test_pauses_between_jobs_on_as_many_ranks_count(tmp_path: Path, clock: Mock) -> None:
    begin(tmp_path, ranks=8).saved(10, 1000)
    with (tmp_path / PROGRESS_FILE).open("a") as stream:
        stream.write("half a li\n")  # of a job that was killed
    begin(tmp_path, samples=1000)
    clock.return_value += LATER
    progress = begin(tmp_path, samples=1000)
    clock.return_value += LATER
    progress.saved(20, 1040)
    assert lines(tmp_path)[-1][5:7] == [
        "Job throughput: 20.0 TFLOP/s/GPU",
        "Cumulative throughput: 10.0 TFLOP/s/GPU",
    ]


def test_only_the_first_rank_writes_and_a_disk_that_fails_costs_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = Log(rank=1, world_size=2)
    ProgressFile(str(tmp_path), LARGE, log, start_samples=0, job_id="").saved(1, 1)
    assert not list(tmp_path.iterdir())
    (tmp_path / PROGRESS_FILE).mkdir()
    progress = begin(tmp_path)
    progress.saved(1, 1)
    progress.finished(1)
    assert capsys.readouterr().out.count("--log-progress is left out from here on: ") == 1


def test_numbers_follow_the_highest_that_anything_has(tmp_path: Path) -> None:
    assert next_number(tmp_path / "absent") == 1
    for name in ("a.earlier_9.run.json", "a.earlier_x", "a.earlier_", "b.earlier_20", "earlier_3"):
        (tmp_path / name).write_text("")
    assert earlier_file(tmp_path / "a").name == "a.earlier_10"
    assert next_number(tmp_path) == 4
