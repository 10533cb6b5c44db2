"""The metrics file: its fields, its precision, and the effect of a resume."""

import math
from dataclasses import fields, replace
from pathlib import Path

import pytest

from paro.report.metrics import MetricsFile
from paro.report.record import Metrics, summarize
from tests.helpers.commands import read_lines
from tests.helpers.refusals import refused
from tests.paro.report.test_report import FACTS, record

LINE = replace(summarize([record(1)], FACTS, peak_memory_bytes=10**9), lm_loss=0.1 + 0.2)


def write(path: Path, iterations: range, start_iteration: int, *, loss: float = 1.0) -> None:
    metrics_file = MetricsFile(str(path), start_iteration=start_iteration)
    for iteration in iterations:
        metrics_file.write(replace(LINE, iteration=iteration, lm_loss=loss))
    metrics_file.close()


def test_numbers_are_whole_or_null_and_lines_are_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    metrics_file = MetricsFile(str(path), start_iteration=0)
    metrics_file.write(LINE)
    metrics_file.write(replace(LINE, lm_loss=math.nan, grad_norm=math.inf))
    whole, null = read_lines(path)
    assert list(whole) == [field.name for field in fields(Metrics)]
    assert whole["lm_loss"] == 0.1 + 0.2
    assert null["lm_loss"] is null["grad_norm"] is None


def test_a_resume_at_the_end_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 6), 0)
    before = path.read_bytes()
    write(path, range(0), 5)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_line_cut_short_by_a_crash_goes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4), 0)
    with path.open("a") as stream:
        stream.write('{"iteration": 4, "consumed_sam')
    write(path, range(4, 5), 3)
    assert [line["iteration"] for line in read_lines(path)] == [1, 2, 3, 4]


def test_a_fresh_run_keeps_the_old_file_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4), 0)
    before = path.read_bytes()
    write(path, range(1, 2), 0)
    assert [line["iteration"] for line in read_lines(path)] == [1]
    assert (tmp_path / "metrics.jsonl.previous").read_bytes() == before


@pytest.mark.parametrize("text", ["my notes\n", "[1, 2]\n", '{"step": 1}\n', "no newline"])
def test_a_file_that_is_something_else_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    refused(lambda: MetricsFile(str(path), start_iteration=0), f"--metrics-file {path}")
    assert path.read_text() == text


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = str(tmp_path / "file" / "m.jsonl")
    told = f"--metrics-file {path} cannot be written"
    refused(lambda: MetricsFile(path, start_iteration=0), told)
