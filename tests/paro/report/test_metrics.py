"""The metrics file: its fields, its precision, and the effect of a resume."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from paro.errors import UserError
from paro.report.metrics import MetricsFile
from paro.report.record import Metrics

LINE = Metrics(
    iteration=1,
    consumed_samples=8,
    lm_loss=0.1 + 0.2,
    grad_norm=1.5,
    learning_rate=3e-4,
    iteration_time_ms=12.5,
    data_wait_ms=0.5,
    tokens_per_second=1e5,
    tflops_per_device=0.5,
    mfu=0.25,
    mfu_causal=0.2,
    peak_memory_bytes=10**9,
    peak_reserved_bytes=None,
    model_state_bytes=10**8,
    intra_bytes=123,
    inter_bytes=45,
    exposed_gather_ms=1.0,
    exposed_reduce_ms=2.0,
    exposed_publish_ms=3.0,
    exposed_intra_ms=None,
    exposed_inter_ms=4.0,
    skipped_iterations=0,
    nan_iterations=0,
)


def write(path: Path, iterations: range, start_iteration: int, *, loss: float = 1.0) -> None:
    metrics_file = MetricsFile(str(path), start_iteration=start_iteration)
    for iteration in iterations:
        metrics_file.write(replace(LINE, iteration=iteration, lm_loss=loss))
    metrics_file.close()


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_fields_and_their_order(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    write(path, range(1, 2), 0)
    assert list(read(path)[0]) == [
        "iteration",
        "consumed_samples",
        "lm_loss",
        "grad_norm",
        "learning_rate",
        "iteration_time_ms",
        "tokens_per_second",
        "data_wait_ms",
        "tflops_per_device",
        "mfu",
        "mfu_causal",
        "peak_memory_bytes",
        "peak_reserved_bytes",
        "model_state_bytes",
        "intra_bytes",
        "inter_bytes",
        "exposed_gather_ms",
        "exposed_reduce_ms",
        "exposed_publish_ms",
        "exposed_intra_ms",
        "exposed_inter_ms",
        "skipped_iterations",
        "nan_iterations",
    ]


def test_losses_keep_full_precision_and_lines_are_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics_file = MetricsFile(str(path), start_iteration=0)
    metrics_file.write(LINE)
    assert read(path)[0]["lm_loss"] == 0.1 + 0.2


def test_no_number_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics_file = MetricsFile(str(path), start_iteration=0)
    metrics_file.write(replace(LINE, lm_loss=math.nan, grad_norm=math.inf))
    assert read(path)[0]["lm_loss"] is None
    assert read(path)[0]["grad_norm"] is None


def test_a_resumed_run_repeats_no_iteration(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 8), 0, loss=1.0)
    write(path, range(6, 11), 5, loss=2.0)
    assert [line["iteration"] for line in read(path)] == list(range(1, 11))
    assert [line["lm_loss"] for line in read(path)] == [1.0] * 5 + [2.0] * 5


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
    assert [line["iteration"] for line in read(path)] == [1, 2, 3, 4]


def test_a_fresh_run_keeps_the_old_file_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4), 0)
    before = path.read_bytes()
    write(path, range(1, 2), 0)
    assert [line["iteration"] for line in read(path)] == [1]
    assert (tmp_path / "metrics.jsonl.previous").read_bytes() == before


@pytest.mark.parametrize("text", ["my notes\n", "[1, 2]\n", '{"step": 1}\n', "no newline"])
def test_a_file_that_is_something_else_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=r"--metrics-file .*notes\.txt"):
        MetricsFile(str(path), start_iteration=0)
    assert path.read_text() == text


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--metrics-file .*m\.jsonl cannot be written"):
        MetricsFile(str(tmp_path / "file" / "m.jsonl"), start_iteration=0)
