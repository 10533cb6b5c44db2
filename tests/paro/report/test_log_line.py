"""The printed lines, character by character, and their values in existing parsers."""

import math
import re
from dataclasses import replace
from datetime import datetime

import pytest

from paro.report.log_line import (
    TimeLeft,
    arguments_block,
    duration,
    iteration_line,
    straggler_line,
    timer_lines,
    validation_block,
)
from paro.report.record import IterationRecord, RankTimes, Validation, summarize
from tests.paro.report import test_report

NOW = datetime(2026, 3, 1, 12, 30, 5)
FACTS = replace(test_report.FACTS, world_size=4, seq_length=128, train_iters=1000)


def record(iteration: int = 10, **changes: object) -> IterationRecord:
    values: dict[str, object] = {
        "consumed_samples": 32 * iteration,
        "global_batch_size": 32,
        "lm_loss": 7.0,
        "grad_norm": 1.25,
        "learning_rate": 3e-4,
        "iteration_time_ms": 500.0,
    }
    return replace(test_report.record(iteration), **(values | changes))  # type: ignore[arg-type]


def line(*interval: IterationRecord, with_throughput: bool = False) -> str:
    metrics = summarize(interval, FACTS, peak_memory_bytes=1)
    return iteration_line(
        interval, metrics, FACTS, with_throughput=with_throughput, seconds_left=3723.0, now=NOW
    )


def test_the_line_is_megatrons_with_three_fields_appended() -> None:
    # 32 samples of 128 tokens in half a second; 2048 tokens/s per rank at 6e6 FLOPs of 1e12.
    assert line(record(lm_loss=7.5)) == (
        " [2026-03-01 12:30:05] iteration       10/    1000 | consumed samples:          320 |"
        " elapsed time per iteration (ms): 500.0 | learning rate: 3.000000E-04 |"
        " global batch size:    32 | lm loss: 7.500000E+00 | loss scale: 1.0 | grad norm: 1.250 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |"
        " tokens/s: 8192.0 | MFU: 1.23% | time left: 1:02:03 |"
    )
    told = line(record(num_zeros=0.0, params_norm=3.45649), with_throughput=True)
    assert " | throughput per GPU (TFLOP/s/GPU): 0.0 | learning rate: " in told
    assert " | grad norm: 1.250 | num zeros: 0.0 | params norm: 3.456 | number of skip" in told


NAN = {"lm_loss": math.nan, "grad_norm": math.nan, "skipped": True}


@pytest.mark.parametrize(
    ("interval", "loss", "norm", "skipped", "nan"),
    [
        ([record(8, lm_loss=2.0), record(9, **NAN), record(10, lm_loss=3.0)], 2.5, "1.250", 1, 1),
        ([record(**NAN)], None, "nan", 1, 1),
        ([record(9, lm_loss=3.0), record(has_tokens=False, **NAN)], 3.0, None, 1, 0),
        ([record(has_tokens=False, **NAN)], None, None, 1, 0),
    ],
    ids=["some skipped", "all skipped", "the last without tokens", "without tokens"],
)
def test_loss_is_the_mean_of_what_was_not_skipped(
    interval: list[IterationRecord], loss: float | None, norm: str | None, skipped: int, nan: int
) -> None:
    text = line(*interval)
    assert re.findall(r"lm loss: (\S+)", text) == ([] if loss is None else [f"{loss:.6E}"])
    assert re.findall(r"grad norm: (\S+)", text) == ([] if norm is None else [norm])
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


def test_arguments_are_sorted_and_dotted() -> None:
    _, *lines, _ = arguments_block({"lr": 0.1, "bf16": True, "Zeta": None}).split("\n")
    names = [("bf16", 44, True), ("lr", 46, 0.1), ("Zeta", 44, None)]
    assert lines == [f"  {name} {'.' * dots} {value}" for name, dots, value in names]


TIMERS = [{"forward-backward": 2.0, "optimizer": 0.1}, {"forward-backward": 3.0, "optimizer": 0.3}]


@pytest.mark.parametrize(
    ("option", "forward_backward", "optimizer"),
    [
        ("minmax", " (200.00, 300.00)", " (10.00, 30.00)"),
        ("max", " 300.00", " 30.00"),
        ("all", "\n rank 0: 200.00\n rank 1: 300.00", "\n rank 0: 10.00\n rank 1: 30.00"),
    ],
)
def test_timer_lines(option: str, forward_backward: str, optimizer: str) -> None:
    _, told = timer_lines(TIMERS, option=option, iterations=10).split("\n", 1)
    told = re.sub(r" +", " ", re.sub(r" \.+:", ":", told))
    assert told == f" forward-backward:{forward_backward}\n optimizer:{optimizer}"


@pytest.mark.parametrize(
    ("ranks", "told"),
    [  # data, communication and agreement of each rank in a step of 1 s
        ([(0, 0.1, 0.3), (0, 0, 0), (0, 0.1, 0.3)], "rank: 1 ... compute, 400.0 ms above the med"),
        ([(0, 0.1, 0.3), (0, 0.1, 0.3), (0.3, 0.1, 0)], "rank: 2 ... cause: data, 300.0 ms above"),
        ([(0, 0.2, 0), (0, 0.21, 0)], "cause: communication, every rank waits 200.0 ms"),
        ([(0, 0.01, 0), (0, 0, 0.01)], "cause: none"),
    ],
)
def test_the_rank_that_others_wait_for_is_named_with_the_cause(
    ranks: list[tuple[float, float, float]], told: str
) -> None:
    of_step = [
        RankTimes(step=1.0, data=data, communication=sent, agreement=waited)
        for data, sent, waited in ranks
    ]
    line = straggler_line([times + times for times in of_step], iterations=2)
    assert all(part in line for part in told.split(" ... ")), line


def test_time_left_counts_what_comes_between_iterations_and_a_change_of_pace() -> None:
    now = 1000.0
    left = TimeLeft(10_000, clock=lambda: now)
    assert left.after(1, seconds=50.0) == 9_999 * 50.0
    now += 2.0
    assert left.after(2, seconds=2.0) == 9_998 * 2.0
    now += 2.0 + 6.0  # an evaluation
    assert left.after(3, seconds=2.0) == 9_997 * 5.0
    for iteration in range(4, 2004):
        now += 3.0
        seconds = left.after(iteration, seconds=0.0)
    assert seconds == pytest.approx((10_000 - 2003) * 3.0)
    assert left.after(10_000, seconds=2.0) == 0.0


def test_durations() -> None:
    texts = {-1: "0:00:00", 59.6: "0:01:00", 3723: "1:02:03", 90061: "1 d 1:01:01"}
    assert {seconds: duration(seconds) for seconds in texts} == texts
