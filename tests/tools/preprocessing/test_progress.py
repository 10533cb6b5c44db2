"""The time left is computed from the bytes read; a terminal gets a bar instead of lines."""

from __future__ import annotations

import io
import time

import pytest

from tools.preprocessing.encode import Tally
from tools.preprocessing.progress import Progress


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


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

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
