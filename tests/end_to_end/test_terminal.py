"""On a terminal a view stays in place of log lines; elsewhere, and where asked, lines scroll."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest

from tests.end_to_end.test_training import MODEL, SCRIPT
from tests.helpers.ranks import ROOT

RUN = [sys.executable, SCRIPT, *MODEL, "--mock-data", "--train-iters", "4"]


def on_a_terminal(*flags: str) -> str:
    """What a run writes to a terminal of its own."""
    here, there = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    with subprocess.Popen(
        [*RUN, *flags], cwd=ROOT, env=environment, stdout=there, stderr=there, close_fds=True
    ) as process:
        os.close(there)
        written = b""
        while True:
            try:
                part = os.read(here, 65536)
            except OSError:  # the last process that could write has left
                break
            if not part:
                break
            written += part
    os.close(here)
    assert process.returncode == 0, written.decode()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())


@pytest.mark.ranks
def test_a_terminal_gets_a_view_and_lines_where_it_asks_for_them() -> None:
    live = on_a_terminal()
    assert "iteration 4/4" in live
    assert "MFU" in live
    assert "tokens/s" in live
    assert "parameters" in live
    assert "memory (MB)" in live  # other lines scroll by above
    assert "elapsed time per iteration" not in live
    lines = on_a_terminal("--terminal", "lines")
    assert lines.count("elapsed time per iteration") == 4
    assert "iteration 4/4" not in lines
