"""What is printed: the view on a terminal, and lines of any text on any stream."""

from __future__ import annotations

import io
import logging
import math
import re
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from paro.distributed.exposed_time import ExposedTime
from paro.report.config import ReportConfig
from paro.report.live_view import LiveConsole, LiveView, Sparkline
from paro.report.log import Log, Terminal, print_line, set_logging_level
from paro.report.record import IterationRecord, Validation, summarize
from tests.helpers.streams import FAILURES, Failing
from tests.paro.report.test_report import FACTS, record
from tests.paro.report.test_report import make as make_report

PLACEMENT = ["state       placed", "parameters  I"]


def make(
    *, width: int = 110, height: int = 40, bytes_before: int = 290_000_000
) -> tuple[LiveView, io.StringIO]:
    stream = io.StringIO()
    console = Console(
        file=stream, force_terminal=True, width=width, height=height, color_system=None
    )
    facts = replace(FACTS, predicted={"total": 5_000_000})
    view = LiveView(
        facts, title="llama", placement=PLACEMENT, bytes_before=bytes_before, console=console
    )
    return view, stream


def show(view: LiveView, seen: IterationRecord) -> None:
    metrics = summarize([seen], FACTS, peak_memory_bytes=300_000_000)
    view.iteration(seen, metrics, seconds_left=2.0)


def drawn(*seen: IterationRecord | Validation, **sizes: int) -> str:
    view, stream = make(**sizes)
    for one in seen:
        view.validation(one) if isinstance(one, Validation) else show(view, one)
    view.close()
    return stream.getvalue()


def last_of(text: str) -> list[str]:
    last = "╭" + text.rpartition("╭")[2]
    return last[: last.rindex("╯") + 1].splitlines()


def test_it_shows_progress_loss_throughput_memory_and_placement() -> None:
    evaluations = Validation(2, 16, 6.5, "all"), Validation(4, 32, 5.25, "all", 1.5)
    text = drawn(*evaluations, replace(record(5), exposed=ExposedTime(gather=0.02, reduce=0.005)))
    for wanted in (
        *("llama", "iteration 5/20", "25.0%, 0:00:02 left", "5.0000", "parameters  I"),
        "validation  5.2500 (1.5000 bits per byte) at iteration 4 ",
        *("1,280 tokens/s, 640 a device", "0.38% with attention in full"),
        "process 300.0 MB at most, 290.0 MB before the model; tensors 5.0 MB predicted ",
        "computing waits 25 ms for it (25%, exposed)",
        "learning rate 1.000E-01, gradient norm 1.000",
    ):
        assert wanted in text, wanted
    of_gpu = drawn(record(5), bytes_before=0)
    assert "tensors 300.0 MB at most, 5.0 MB predicted " in of_gpu, "those of the allocator"
    losses = {"validation-web": 2.0, "validation-books": None, "test": 4.0}
    found = [Validation(4, 32, loss, "all", data_set=name) for name, loss in losses.items()]
    sets = "web 2.0000 at iteration 4, books no answered token at iteration 4, test 4.0000"
    assert sets in drawn(*found, record(5))
    skipped = replace(record(3), skipped=True, lm_loss=math.nan)
    assert "lowest so far 2.0000" in drawn(record(2), skipped)


@pytest.mark.parametrize("width", [60, 200])
def test_it_is_as_wide_as_the_terminal(width: int) -> None:
    lines = last_of(drawn(*map(record, range(1, 20)), width=width))
    assert {len(line) for line in lines} == {width}
    stream = io.StringIO()
    Console(file=stream, width=8).print(Sparkline((1.0, math.inf, 2.0, math.nan)))
    assert stream.getvalue() == "▁█\n"
    (loss,) = (line for line in lines if "loss " in line)
    assert re.search("19.0000  ▁[▁-█]+█ +lowest so far 1.0000", loss)
    assert "parameters  I" in "".join(lines)
    lines = last_of(drawn(record(5), height=12))  # low: figures and no placement
    assert len(lines) <= 12
    assert "gradient norm" in "".join(lines)
    assert "parameters" not in "".join(lines)


def test_a_terminal_that_gets_narrower_keeps_nothing_of_the_wrapped_view_on_the_screen() -> None:
    view, stream = make()
    anew = "\n" * view.console.height + "\x1b[H"
    for width, starts in ((110, 0), (60, 1), (60, 1), (80, 1), (79, 2)):
        view.console.width = width
        view.show("a line")
        assert stream.getvalue().count(anew) == starts
    show(view, record(5))
    view.console.width = 60
    view.close()
    assert stream.getvalue().count(anew) == 3
    assert {len(line) for line in last_of(stream.getvalue())} == {60}


def test_what_is_printed_meanwhile_scrolls_by_above_and_views_are_few() -> None:
    view, stream = make()
    log = Log(rank=0, world_size=4, one_speaker=True, write=view.show)
    assert log.is_last
    assert not replace(log, rank=3).is_last
    log.log_last("validation loss [at] iteration 3")
    assert "validation loss [at] iteration 3\n" in stream.getvalue()
    for _ in range(50):
        show(view, record(1))
    assert stream.getvalue().count("tokens/s") <= 2
    view.close()


def test_what_a_launcher_wrote_below_is_not_drawn_over() -> None:
    view, stream = make()
    show(view, record(5))
    stream.write("Received 2 death signal\n")
    report = make_report(ReportConfig())
    report.view = view
    report.interrupted()
    report.interrupted()
    view.close()
    below = stream.getvalue().partition("Received 2 death signal\n")[2]
    blank, _, drawn = below.partition("╭")
    assert blank.count("\n") == drawn.partition("╯")[0].count("\n") + 1
    assert 0 < blank.count("\x1b[1A") < blank.count("\n")


@pytest.mark.parametrize("number", FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("fails_at", ["a line", "an iteration", "a signal", "the end"])
def test_a_terminal_that_is_gone_costs_the_view_and_not_the_run(
    monkeypatch: pytest.MonkeyPatch, number: int, fails_at: str
) -> None:
    output, errors = Failing(number, fails=False), io.StringIO()
    monkeypatch.setattr(output, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "stderr", errors)
    terminal = Terminal()
    report = make_report(ReportConfig(log_interval=1))
    report.log = Log(one_speaker=True, write=terminal.show)
    console = LiveConsole(stderr=terminal.keeps_lines)
    report.view = terminal.view = LiveView(FACTS, title="", placement=(), console=console)
    monkeypatch.setattr("paro.report.live_view._LEAST_SECONDS", 0.0)
    report.iteration(record(1))
    output.fails = True
    actions = {
        "a line": lambda: report.log.log0("saved"),
        "an iteration": lambda: report.iteration(record(2)),
        "a signal": report.interrupted,
        "the end": report.close,
    }
    actions[fails_at]()
    report.iteration(record(3))
    report.close()
    assert sys.stdout is errors
    assert "elapsed time per iteration" not in output.getvalue()
    assert " iteration        3/      20 |" in errors.getvalue()
    assert "│" not in errors.getvalue()


HOSTILE = "\x1b[2J\u202e"
ESCAPED = "\\x1b[2J\\u202e"


def test_lines_are_escaped_and_cut(capsys: pytest.CaptureFixture[str]) -> None:
    print_line(HOSTILE, "b\nc", "x" * 10**6)
    first, second, third, long, end = capsys.readouterr().out.split("\n")
    assert (first, second, third, end) == (ESCAPED, "b", "c", "")
    assert len(long) <= 10_000
    print_line(HOSTILE, end="", whole=True)  # for a text that the user asked for
    print_line("x" * 10**5, whole=True)
    assert capsys.readouterr().out == f"{ESCAPED}{'x' * 10**5}\n"
    print_line(HOSTILE, stream=sys.stderr)
    assert capsys.readouterr() == ("", f"{ESCAPED}\n")
    written: list[str] = []
    log = Log(write=written.append)
    for show in (log.show, log.log0, log.log_last):
        show(f"{HOSTILE}{'x' * 10**6}")
    assert len(written) == 3
    assert all(line.startswith(ESCAPED) and len(line) <= 10_000 for line in written)


def test_libraries_say_what_the_level_lets_through(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    before = root.level
    for level, shown in ((20, True), (40, False), (None, False)):
        monkeypatch.setattr(root, "handlers", [])  # as in a new process
        root.setLevel(logging.WARNING)
        set_logging_level(level)
        logging.getLogger("some_package").info("hello")
        root.setLevel(before)
        assert ("hello" in capsys.readouterr().err) == shown
