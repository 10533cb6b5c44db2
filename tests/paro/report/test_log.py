"""What is printed: names from files and flags cannot act upon a terminal or fill it.

A standard output that fails is an error for a tool, and none for the log of a training.
"""

from __future__ import annotations

import errno
import io
import logging
import sys

import pytest

from paro.report.log import Log, print_line, set_logging_level
from tests.helpers.streams import FAILURES, Failing

HOSTILE = "\x1b[2J\u202e"
ESCAPED = "\\x1b[2J\\u202e"


def test_lines_are_escaped_and_cut(capsys: pytest.CaptureFixture[str]) -> None:
    print_line(HOSTILE, "b\nc", "x" * 10**6)
    first, second, third, long, end = capsys.readouterr().out.split("\n")
    assert (first, second, third, end) == (ESCAPED, "b", "c", "")
    assert len(long) <= 10_000


def test_a_text_that_the_user_asked_for_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    print_line(HOSTILE, end="", whole=True)
    print_line("x" * 10**5, whole=True)
    assert capsys.readouterr().out == f"{ESCAPED}{'x' * 10**5}\n"


def test_another_stream(capsys: pytest.CaptureFixture[str]) -> None:
    print_line(HOSTILE, stream=sys.stderr)
    assert capsys.readouterr() == ("", f"{ESCAPED}\n")


def test_every_line_of_the_log_is_escaped_and_cut() -> None:
    written = io.StringIO()
    log = Log(write=written.write)
    for show in (log.show, log.log0, log.log_last):
        show(f"{HOSTILE}{'x' * 10**6}")
        assert written.getvalue().startswith(ESCAPED)
        assert len(written.getvalue()) <= 10_000
        written.seek(0)
        written.truncate()


@pytest.mark.parametrize(("level", "shown"), [(20, True), (40, False), (None, False)])
def test_libraries_say_what_the_level_lets_through(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    level: int | None,
    shown: bool,
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])  # as in a new process
    before = root.level
    root.setLevel(logging.WARNING)
    try:
        set_logging_level(level)
        logging.getLogger("some_package").info("hello")
    finally:
        root.setLevel(before)
    assert ("hello" in capsys.readouterr().err) == shown


@pytest.mark.parametrize("number", FAILURES.values(), ids=FAILURES)
def test_where_standard_output_fails_the_log_goes_to_standard_error(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    output, errors = Failing(number, fails=False), Failing(number, fails=False)
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "stderr", errors)
    log = Log()
    log.show("a")
    output.fails = True
    for message in "bc":
        log.show(message)
    assert output.getvalue() == "a\n"
    notice, *rest = errors.getvalue().splitlines()
    assert "[Rank 0] standard output cannot be written: " in notice
    assert rest == ["b", "c"]

    errors.fails = True
    for message in "def":
        log.show(message)
    assert errors.getvalue().splitlines() == [notice, *rest]
    print("what libraries print is no error either", flush=True)
    sys.stdout.close()


@pytest.mark.parametrize("number", FAILURES.values(), ids=FAILURES)
def test_where_standard_output_fails_a_tool_does(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(sys, "stdout", Failing(number))
    with pytest.raises(OSError, match="standard output cannot be written: ") as caught:
        print_line("the answer")
    assert isinstance(caught.value, BrokenPipeError) == (number == errno.EPIPE)
    print_line("progress", stream=sys.stdout)
