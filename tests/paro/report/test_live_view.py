"""The view on a terminal: its content, and other lines that scroll above it."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from paro.distributed.exposed_time import Exposed
from paro.report.live_view import LiveView, duration, spark_line
from paro.report.log import Log
from paro.report.record import summarize
from tests.paro.report.test_report import FACTS, record

PLACEMENT = ["state       placed", "parameters  I"]


def make() -> tuple[LiveView, io.StringIO]:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=110, height=40, color_system=None)
    facts = replace(FACTS, predicted={"total": 5_000_000})
    view = LiveView(
        facts, title="llama", placement=PLACEMENT, bytes_before=290_000_000, console=console
    )
    return view, stream


def test_it_shows_progress_loss_throughput_memory_and_placement() -> None:
    view, stream = make()
    seen = replace(record(5), exposed=Exposed(gather=0.02, reduce=0.005))
    view.iteration(seen, summarize([seen], FACTS, peak_memory_bytes=300_000_000))
    view.close()
    text = stream.getvalue()
    for wanted in (
        "llama",
        "iteration 5/20",
        "25.0%, 0:00:02 left",  # 15 of 0.1 s
        "5.0000",
        "1,280 tokens/s, 640 a device",
        "0.38% with attention in full",
        "300.0 MB at most, 295.0 MB predicted ",
        "exposed 25 ms (25%)",
        "learning rate 1.000E-01, gradient norm 1.000",
        "parameters  I",
    ):
        assert wanted in text, wanted


def test_what_is_printed_meanwhile_scrolls_by_above() -> None:
    view, stream = make()
    log = Log(rank=0, world_size=4, one_speaker=True, write=view.show)
    assert log.is_last
    log.log_last("validation loss [at] iteration 3")
    log.log0("saved")
    view.close()
    assert "validation loss [at] iteration 3\n" in stream.getvalue()
    assert "saved\n" in stream.getvalue()
    assert not Log(rank=3, world_size=4, one_speaker=True).is_last


def test_what_a_launcher_wrote_below_is_not_drawn_over() -> None:
    view, stream = make()
    seen = record(5)
    view.iteration(seen, summarize([seen], FACTS, peak_memory_bytes=1))
    stream.write("Received 2 death signal\n")
    view.begin_below()
    view.begin_below()
    view.close()
    below = stream.getvalue().partition("Received 2 death signal\n")[2]
    blank, _, drawn = below.partition("╭")
    assert blank.count("\n") == drawn.partition("╯")[0].count("\n") + 1
    assert 0 < blank.count("\x1b[1A") < blank.count("\n")


def test_it_is_drawn_a_few_times_a_second_at_most() -> None:
    view, stream = make()
    seen = record(1)
    metrics = summarize([seen], FACTS, peak_memory_bytes=1)
    for _ in range(50):
        view.iteration(seen, metrics)
    assert stream.getvalue().count("tokens/s") <= 2
    view.close()


def test_a_skipped_iteration_has_no_part_in_the_loss() -> None:
    view, stream = make()
    for seen in (record(2), replace(record(3), skipped=True, lm_loss=math.nan)):
        view.iteration(seen, summarize([seen], FACTS, peak_memory_bytes=1))
    view.close()
    assert "least 2.0000" in stream.getvalue()


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([], ""),
        ([math.nan], ""),
        ([1.0], "▁"),
        ([3.0, 2.0, 1.0], "█▅▁"),
        ([1.0, math.inf, 2.0], "▁█"),
        ([float(i // 2) for i in range(16)], "▁▂▃▄▅▆▇█"),
    ],
)
def test_spark_line(values: list[float], wanted: str) -> None:
    assert spark_line(values, width=8) == wanted


def test_durations() -> None:
    assert [duration(s) for s in (-1, 59.6, 3723, 90061)] == [
        "0:00:00",
        "0:01:00",
        "1:02:03",
        "1 d 1:01:01",
    ]
