"""The output of a run, as called by the training loop, and its lines character by character."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from paro.distributed.exposed_time import ExposedTime
from paro.errors import UserError
from paro.launch.setup import closing
from paro.report import report as report_module
from paro.report.config import ReportConfig
from paro.report.log import Log
from paro.report.log_line import (
    duration,
    iteration_line,
    straggler_line,
    timer_lines,
    validation_block,
)
from paro.report.memory import MemoryForecast
from paro.report.record import (
    IterationRecord,
    PeakThroughput,
    PlannedStep,
    RankTimes,
    RunFacts,
    Validation,
    summarize,
)
from paro.report.report import Report, open_report
from tests.helpers.refusals import output_of, read_lines

FACTS = RunFacts(
    world_size=2,
    seq_length=16,
    train_iters=20,
    flops_per_token=6e6,
    flops_per_token_causal=5e6,
    peak=PeakThroughput(flops_per_second=1e12, source="typed in"),
    model_state_bytes=2**20,
)


def make(
    config: ReportConfig, *, rank: int = 0, world_size: int = 1, start: int = 0, **more: Any
) -> Report:
    log, cpu = Log(rank=rank, world_size=world_size), torch.device("cpu")
    more |= {"device": cpu, "start_iteration": start, "arguments": {}}
    return open_report(config, FACTS, log, **more)


def record(iteration: int) -> IterationRecord:
    return IterationRecord(
        iteration=iteration,
        consumed_samples=8 * iteration,
        global_batch_size=8,
        lm_loss=float(iteration),
        grad_norm=1.0,
        learning_rate=0.1,
        loss_scale=1.0,
        iteration_time_ms=100.0,
        skipped=False,
        intra_bytes=10,
        inter_bytes=20,
    )


def run(report: Report, iterations: range) -> str:

    def iterate() -> None:
        for iteration in iterations:
            report.iteration(record(iteration))
        report.close()

    return output_of(iterate)


def logged(path: Path) -> dict[int, float]:
    return {line["iteration"]: line["lm_loss"] for line in read_lines(path)}


def test_multiples_of_the_interval_and_the_first_are_logged_and_none_twice(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    config = ReportConfig(log_interval=5, metrics_file=str(path))
    assert run(make(config), range(1, 13)).count("| lm loss: ") == 3
    assert logged(path) == {1: 1.0, 5: 3.5, 10: 8.0}
    run(make(config, start=7), range(8, 16))
    assert [*logged(path)] == [1, 5, 8, 10, 15]


def test_the_first_rank_writes_and_the_last_prints(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    config = ReportConfig(log_interval=1, metrics_file=str(path), tensorboard_dir=str(tmp_path))
    message = run(make(config.without_records()), range(1, 2))
    assert " iteration        1/      20 |" in message
    assert not list(tmp_path.iterdir()), "a run without records writes"
    config = ReportConfig(log_interval=1, metrics_file=str(path))
    assert run(make(config, rank=0, world_size=2), range(1, 2)) == ""
    assert [*logged(path)] == [1]
    assert " iteration        1/      20 |" in run(make(config, rank=1, world_size=2), range(1, 2))
    assert [*logged(path)] == [1]


def test_what_dashboards_got_is_written_before_the_report_ends() -> None:
    ends = Mock()
    report = make(ReportConfig(log_interval=1))
    report.dashboards.open("--board", lambda: Mock(close=ends))
    run(report, range(1, 2))
    ends.assert_called_once_with()


@pytest.mark.parametrize("error", [UserError("all"), UserError("one", on_this_rank=True)])
def test_ranks_end_together_after_an_error_that_all_of_them_have(error: UserError) -> None:
    """A launcher ends the others, which may still write, when the first has left."""
    calls = Mock()
    with pytest.raises(type(error)), closing(calls.report, calls.control):
        raise error
    ends = [] if error.on_this_rank else [call.report.close(), call.control.barrier()]
    assert calls.mock_calls == ends


def test_an_evaluation_has_megatrons_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Mapping[str, float]] = []
    report = make(ReportConfig())
    monkeypatch.setattr(report.dashboards, "write", lambda values, *_: written.append(values))
    report.validation(Validation(2, 16, 1.0, "all", 0.5, ema_loss=0.75))
    report.validation(Validation(2, 16, 1.0, "all", data_set="test"))
    report.validation(Validation(2, 16, None, "all", data_set="validation-empty"))
    ppl = pytest.approx(2.718281828)
    assert written == [
        {
            "lm loss validation": 1.0,
            "lm loss validation ppl": ppl,
            "lm loss validation ema": 0.75,
            "bits per byte validation": 0.5,
        },
        {"lm loss test": 1.0, "lm loss test ppl": ppl},
    ]


PLANNED = PlannedStep(
    machine="ours",
    global_batch_size=8,
    seconds={"step": 0.1, "computing": 0.06, "gather": 0.01, "reduce": 0.02, "publish": 0.01},
)


def compared(path: Path, planned: PlannedStep, last: int) -> str:
    """What a run prints of a plan, whose steps take 100 ms and wait 40 of them."""
    report = make(ReportConfig(log_interval=100, metrics_file=str(path)))
    report.facts = replace(FACTS, planned=planned)
    sizes = {"predicted_bytes": 0, "reserved_bytes": 0, "states_bytes": 0}
    report.forecast = MemoryForecast(**sizes, bytes_before=2**60)
    waits = ExposedTime(gather=0.01, reduce=0.02, publish=0.01)

    def iterate() -> None:
        for iteration in range(1, last + 1):
            # The first steps of a process take longer, and a ramp-up has smaller ones.
            milliseconds = 900.0 if iteration < 10 else 100.0
            slower = replace(record(iteration), iteration_time_ms=milliseconds)
            size = 4 if iteration == 12 else 8
            report.iteration(replace(slower, exposed=waits, global_batch_size=size))
        report.close()

    lines = output_of(iterate).splitlines()
    return "\n".join(line for line in lines if "iteration" not in line)


def test_measured_steps_are_set_beside_the_planners(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert compared(path, PLANNED, 19) == ""
    as_planned = compared(path, PLANNED, 25)
    assert "a step 0.1 (0.1): computing 0.06 (0.06), gathers 0.01 (0.01), gradient" in as_planned
    assert "than planned" not in as_planned
    assert as_planned.count("> memory is not as planned; --log-memory-interval 1 measures") == 1
    start = json.loads(Path(f"{path}.run.json").read_text())["starts"][-1]
    assert start["measured"]["seconds"] == pytest.approx(dict(PLANNED.seconds))
    slow = {**PLANNED.seconds, "step": 0.05, "reduce": 0.001, "computing": 0.029}
    lines = compared(path, replace(PLANNED, seconds=slow), 25).splitlines()
    assert [line.split()[1] for line in lines] == ["measured", "computing:", "gradient", "memory"]
    assert lines[2].startswith("> gradient reductions: 0.019 s more than planned; tools/bench_coll")
    shares = {**PLANNED.seconds, "context": 0.03}  # attention waits for other ranks
    lines = compared(path, replace(PLANNED, seconds=shares), 25).splitlines()
    assert "updated parameters 0.01 (0.01), attention's tokens on other ranks 0 (0.03);" in lines[0]
    assert lines[1].startswith("> attention's tokens on other ranks: 0.03 s less than planned; too")
    assert compared(path, replace(PLANNED, global_batch_size=16), 25) == "", "no step is as planned"


NOW = datetime(2026, 3, 1, 12, 30, 5)
LARGER = replace(FACTS, world_size=4, seq_length=128, train_iters=1000)


ENTRY = replace(
    record(10),
    consumed_samples=320,
    global_batch_size=32,
    lm_loss=7.0,
    grad_norm=1.25,
    learning_rate=3e-4,
    iteration_time_ms=500.0,
)
entry = partial(replace, ENTRY)


def line(*interval: IterationRecord, with_throughput: bool = False) -> str:
    metrics = summarize(interval, LARGER, peak_memory_bytes=1)
    return iteration_line(
        interval, metrics, LARGER, with_throughput=with_throughput, seconds_left=3723.0, now=NOW
    )


def test_the_line_is_megatrons_with_three_fields_appended() -> None:
    # 32 samples of 128 tokens in half a second; 2048 tokens/s per rank at 6e6 FLOPs of 1e12.
    assert line(entry(lm_loss=7.5)) == (
        " [2026-03-01 12:30:05] iteration       10/    1000 | consumed samples:          320 |"
        " elapsed time per iteration (ms): 500.0 | learning rate: 3.000000E-04 |"
        " global batch size:    32 | lm loss: 7.500000E+00 | loss scale: 1.0 | grad norm: 1.250 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |"
        " tokens/s: 8192.0 | MFU: 1.23% | time left: 1:02:03 |"
    )
    message = line(entry(num_zeros=0.0, params_norm=3.45649), with_throughput=True)
    assert " | throughput per GPU (TFLOP/s/GPU): 0.0 | learning rate: " in message
    assert " | grad norm: 1.250 | num zeros: 0.0 | params norm: 3.456 | number of skip" in message


NAN = {"lm_loss": math.nan, "grad_norm": math.nan, "z_loss": math.nan, "skipped": True}


@pytest.mark.parametrize(
    ("interval", "loss", "norm", "skipped", "nan"),
    [
        (
            [entry(iteration=8, lm_loss=2.0), entry(iteration=9, **NAN), entry(lm_loss=3.0)],
            2.5,
            "1.250",
            1,
            1,
        ),
        ([entry(**NAN)], None, "nan", 1, 1),
        ([entry(iteration=9, lm_loss=3.0), entry(has_tokens=False, **NAN)], 3.0, None, 1, 0),
        ([entry(has_tokens=False, **NAN)], None, None, 1, 0),
    ],
    ids=["some skipped", "all skipped", "the last without tokens", "without tokens"],
)
def test_loss_is_the_mean_of_what_was_not_skipped(
    interval: list[IterationRecord], loss: float | None, norm: str | None, skipped: int, nan: int
) -> None:
    text = line(*interval)
    assert re.findall(r"lm loss: (\S+)", text) == ([] if loss is None else [f"{loss:.6E}"])
    assert re.findall(r"grad norm: (\S+)", text) == ([] if norm is None else [norm])
    assert "z loss: " not in text
    assert f"skipped iterations:   {skipped} | number of nan iterations:   {nan} |" in text


def test_validation_stands_between_rules() -> None:
    found = Validation(200, 1600, 2.0, "1 to 48", 0.1234567, "test")
    above, text, below = validation_block(found).split("\n")
    assert text == (
        " validation loss at iteration 200 on test set | lm loss value: 2.000000E+00 | "
        "lm loss PPL: 7.389056E+00 | bits per byte: 0.123457 | samples: 1 to 48 | "
    )
    assert above == below == "-" * (len(text) + 1)
    diverged = validation_block(Validation(1, 8, 1e6, "all"))
    assert " at iteration 1 | " in diverged
    assert "PPL: 4.851652E+08 | samples" in diverged
    without_tokens = validation_block(Validation(1, 8, None, "all"))
    assert re.findall("loss|PPL|[0-9.]+E", without_tokens) == ["loss"], "as in `validation loss at`"


TIMERS = [{"forward-backward": 2.0, "optimizer": 0.1}, {"forward-backward": 3.0, "optimizer": 0.3}]


def test_timer_lines() -> None:
    for option, forward_backward, optimizer in (
        ("minmax", " (200.00, 300.00)", " (10.00, 30.00)"),
        ("max", " 300.00", " 30.00"),
        ("all", "\n rank 0: 200.00\n rank 1: 300.00", "\n rank 0: 10.00\n rank 1: 30.00"),
    ):
        _, message = timer_lines(TIMERS, option=option, iterations=10).split("\n", 1)
        message = re.sub(r" +", " ", re.sub(r" \.+:", ":", message))
        assert message == f" forward-backward:{forward_backward}\n optimizer:{optimizer}"


@pytest.mark.parametrize(
    ("ranks", "message"),
    [  # data, communication and agreement of each rank in a step of 1 s
        ([(0, 0.1, 0.3), (0, 0, 0), (0, 0.1, 0.3)], "rank: 1 ... compute, 400.0 ms above the med"),
        ([(0, 0.1, 0.3), (0, 0.1, 0.3), (0.3, 0.1, 0)], "rank: 2 ... cause: data, 300.0 ms above"),
        ([(0, 0.2, 0), (0, 0.21, 0)], "cause: communication, every rank waits 200.0 ms"),
        ([(0, 0.01, 0), (0, 0, 0.01)], "cause: none"),
    ],
)
def test_the_straggler_is_named(ranks: list[tuple[float, float, float]], message: str) -> None:
    of_step = [
        RankTimes(step=1.0, data=data, communication=sent, agreement=waited)
        for data, sent, waited in ranks
    ]
    line = straggler_line([times + times for times in of_step], iterations=2)
    assert all(part in line for part in message.split(" ... ")), line


def test_time_left_counts_what_comes_between_iterations_and_a_change_of_pace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(report_module, "time", SimpleNamespace(monotonic=lambda: now))
    report = make(ReportConfig())
    report.facts = replace(FACTS, train_iters=10_000)

    def left(iteration: int, seconds: float) -> float:
        return report._seconds_left(replace(record(iteration), iteration_time_ms=1000.0 * seconds))

    assert left(1, 50.0) == 9_999 * 50.0
    now += 2.0
    assert left(2, 2.0) == 9_998 * 2.0
    now += 2.0 + 6.0  # an evaluation
    assert left(3, 2.0) == 9_997 * 5.0
    for iteration in range(4, 2004):
        now += 3.0
        seconds = left(iteration, 0.0)
    assert seconds == pytest.approx((10_000 - 2003) * 3.0)
    assert left(10_000, 2.0) == 0.0
    texts = {-1: "0:00:00", 59.6: "0:01:00", 90061: "1 day, 1:01:01"}
    assert {seconds: duration(seconds) for seconds in texts} == texts
