"""The time left is computed from the bytes read; a terminal gets a bar instead of lines."""

from __future__ import annotations

import io
import time

import pytest

from tools.preprocessing import progress as module
from tools.preprocessing.encode import Tally
from tools.preprocessing.progress import Progress, elapsing


def test_lines_with_rate_and_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    progress = Progress(total_bytes=2**24, interval=10)
    progress.passed_over(2**23)
    now = 102.0
    progress.count(Tally(documents=9, num_bytes=2**20, advance=2**20))
    assert capsys.readouterr().err == ""
    progress.count(Tally(documents=12, num_bytes=2**20, advance=2**20))
    assert capsys.readouterr().err == (
        "Processed 21 documents (10.5 docs/s, 1.00 MB/s). 62% done, 0:00:06 left.\n"
    )
    now = 104.0
    progress.finish()
    assert capsys.readouterr().err == "Processed 21 documents (5.2 docs/s, 0.50 MB/s).\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    progress = Progress(total_bytes=1000, interval=1)
    progress.count(Tally(documents=7, num_bytes=500, advance=500))
    progress.count(Tally(documents=7, num_bytes=500, advance=500))
    progress.finish()
    text = terminal.getvalue()
    assert "100%|" in text
    assert "14 documents" in text
    assert "B/s" in text
    assert text.splitlines()[-1].startswith("Processed 14 documents (")


def test_a_call_that_tells_nothing_is_timed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_NOTICE_SECONDS", 0.01)
    with elapsing("training"):
        time.sleep(0.1)
    first, *others = capsys.readouterr().err.splitlines()
    assert first == "training"
    assert set(others) == {"training, 0:00:00"}
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with elapsing("training"):
        pass
    assert "training, 00:00" in terminal.getvalue()
