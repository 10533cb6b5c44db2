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


def test_throughput_stands_where_megatron_has_it() -> None:
    assert (" | throughput per GPU (TFLOP/s/GPU): 0.0 | learning rate: ") in line(
        record(), with_throughput=True
    )


def test_zeros_and_the_norm_of_parameters_stand_where_megatron_has_them() -> None:
    assert " | grad norm: 1.250 | num zeros: 12.0 | params norm: 3.456 | number of skip" in line(
        record(num_zeros=12.0, params_norm=3.45649)
    )
    assert " | grad norm: 1.250 | num zeros: 0.0 | number of skip" in line(record(num_zeros=0.0))


def test_loss_is_the_mean_of_what_was_not_skipped() -> None:
    interval = (
        record(8, lm_loss=2.0),
        record(9, lm_loss=math.inf, skipped=True, grad_norm=math.inf),
        record(10, lm_loss=3.0, iteration_time_ms=800.0),
    )
    text = line(*interval)
    assert "| lm loss: 2.500000E+00 |" in text
    assert "| elapsed time per iteration (ms): 600.0 |" in text
    assert "number of skipped iterations:   1 | number of nan iterations:   1 |" in text


def test_an_interval_of_skipped_iterations_has_no_loss() -> None:
    text = line(record(lm_loss=math.nan, grad_norm=math.nan, skipped=True))
    assert "lm loss" not in text
    assert "| grad norm: nan |" in text


def test_an_iteration_without_tokens_has_neither_loss_nor_norm_and_is_none_of_the_nans() -> None:
    nothing = {"lm_loss": math.nan, "grad_norm": math.nan, "skipped": True, "has_tokens": False}
    text = line(record(9, lm_loss=3.0), record(10, **nothing))
    assert "| lm loss: 3.000000E+00 |" in text
    assert "grad norm" not in text
    assert "number of skipped iterations:   1 | number of nan iterations:   0 |" in text
    assert "lm loss" not in line(record(**nothing))


def test_an_evaluation_without_tokens_has_no_loss() -> None:
    assert re.findall("loss|PPL|[0-9.]+E", validation_block(Validation(1, 8, None, "all"))) == [
        "loss"
    ], "as in `validation loss at`"


@pytest.mark.parametrize(
    ("data_set", "where"),
    [
        (None, "iteration 200"),
        ("validation", "iteration 200 on validation set"),
        ("test", "iteration 200 on test set"),
    ],
)
def test_validation_stands_between_rules(data_set: str | None, where: str) -> None:
    found = Validation(200, 1600, 2.0, "1 to 48", data_set=data_set)
    block = validation_block(found)
    above, text, below = block.split("\n")
    assert text == (
        f" validation loss at {where} | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
        "samples: 1 to 48 | "
    )
    assert above == below == "-" * (len(text) + 1)
    wanted = text.replace("samples:", "bits per byte: 0.123457 | samples:")
    bits = validation_block(found._replace(bits_per_byte=0.1234567))
    assert bits.split("\n")[1] == wanted


def test_perplexity_of_a_diverged_model_is_bounded() -> None:
    block = validation_block(Validation(1, 8, 1e6, "all"))
    assert "PPL: 4.851652E+08" in block


def test_arguments_are_sorted_and_dotted() -> None:
    block = arguments_block({"lr": 0.1, "bf16": True, "Zeta": None})
    assert block.split("\n") == [
        "------------------------ arguments ------------------------",
        "  bf16 " + "." * 44 + " True",
        "  lr " + "." * 46 + " 0.1",
        "  Zeta " + "." * 44 + " None",
        "-------------------- end of arguments ---------------------",
    ]


TIMERS = [{"forward-backward": 2.0, "optimizer": 0.1}, {"forward-backward": 3.0, "optimizer": 0.3}]


@pytest.mark.parametrize(
    ("option", "wanted"),
    [
        (
            "minmax",
            "(min, max) time across ranks (ms):\n"
            "    forward-backward ...............................: (200.00, 300.00)\n"
            "    optimizer ......................................: (10.00, 30.00)",
        ),
        (
            "max",
            "max time across ranks (ms):\n"
            "    forward-backward ...............................: 300.00\n"
            "    optimizer ......................................: 30.00",
        ),
        (
            "all",
            "times across ranks (ms):\n"
            "  forward-backward:\n     rank  0: 200.00\n     rank  1: 300.00\n"
            "  optimizer:\n     rank  0: 10.00\n     rank  1: 30.00",
        ),
    ],
)
def test_timer_lines(option: str, wanted: str) -> None:
    assert timer_lines(TIMERS, option=option, iterations=10) == wanted


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        # Data, communication and agreement of each rank in a step of 1 s.
        (
            [(0.0, 0.1, 0.3), (0.0, 0.0, 0.0), (0.0, 0.1, 0.3)],
            "slowest rank: 1 | compute (ms): 1000.0 ... compute, 400.0 ms above the median rank",
        ),
        (
            [(0.0, 0.1, 0.3), (0.0, 0.1, 0.3), (0.3, 0.1, 0.0)],
            "slowest rank: 2 ... cause: data, 300.0 ms above",
        ),
        ([(0.0, 0.2, 0.0), (0.0, 0.21, 0.0)], "cause: communication, every rank waits 200.0 ms"),
        ([(0.0, 0.01, 0.0), (0.0, 0.0, 0.01)], "cause: none"),
    ],
)
def test_the_rank_that_others_wait_for_is_named_with_the_cause(
    ranks: list[tuple[float, float, float]], told: str
) -> None:
    times = [
        RankTimes(step=10.0, data=10 * data, communication=10 * sent, agreement=10 * waited)
        for data, sent, waited in ranks
    ]
    line = straggler_line(times, iterations=10)
    assert all(part in line for part in told.split(" ... ")), line


def test_times_add_up() -> None:
    one = RankTimes(step=1.0, data=0.1, communication=0.2, agreement=0.3)
    assert (one + one).compute == pytest.approx(0.8)


def test_it_counts_what_comes_between_iterations_and_not_the_first() -> None:
    now = 1000.0
    left = TimeLeft(100, clock=lambda: now)
    assert left.after(1, seconds=50.0) == 99 * 50.0
    now += 2.0
    assert left.after(2, seconds=2.0) == 98 * 2.0
    now += 2.0 + 6.0  # an evaluation
    assert left.after(3, seconds=2.0) == 97 * 5.0
    assert left.after(100, seconds=2.0) == 0.0


def test_a_change_of_pace_shows() -> None:
    now = 0.0
    left = TimeLeft(10_000, clock=lambda: now)
    for iteration in range(1, 4001):
        now += 1.0 if iteration <= 2000 else 3.0
        seconds = left.after(iteration, seconds=0.0)
    assert seconds == pytest.approx(6000 * 3.0)


def test_durations() -> None:
    assert [duration(s) for s in (-1, 59.6, 3723, 90061)] == [
        "0:00:00",
        "0:01:00",
        "1:02:03",
        "1 d 1:01:01",
    ]
