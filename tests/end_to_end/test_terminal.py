"""On a terminal a live view replaces log lines; elsewhere, or with a flag, lines are printed."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
from pathlib import Path
from typing import IO

import pytest

from paro.checkpoint.directory import TRACKER
from tests.end_to_end.test_training import MODEL, SCRIPT
from tests.helpers.ranks import ROOT
from tests.helpers.warm_python import warm_python

RUN = ["python", SCRIPT, *MODEL, "--mock-data"]
TORCHRUN = ["python", "-m", "torch.distributed.run", "--standalone"]
ONE_MACHINE = ["bash", "examples/one_machine.sh"]


def on_a_terminal(
    *words: str, interrupted: bool = False, output: IO[bytes] | None = None
) -> tuple[str, int]:
    """What a command writes to its own terminal, and its status; optionally with a Ctrl-C.

    Standard output may be elsewhere: then it is what standard error gets.
    """
    here, there = pty.openpty()
    environment = {
        **os.environ,
        "PATH": f"{warm_python()}:{os.environ['PATH']}",
        **{"TERM": "xterm", "COLUMNS": "120", "LINES": "40", "WANDB_MODE": "offline"},
    }
    with subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=output or there, stderr=there
    ) as process:
        os.close(there)
        written = b""
        while True:
            try:
                part = os.read(here, 65536)
            except OSError:  # the last process that could write has exited
                break
            if not part:
                break
            written += part
            if interrupted and re.search(rb"iteration \d+/", written):
                process.send_signal(signal.SIGINT)
                interrupted = False
    os.close(here)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())
    return text.replace("\r\n", "\n"), process.returncode


@pytest.mark.ranks
def test_a_terminal_gets_a_view_and_lines_where_it_asks_for_them() -> None:
    short = [*RUN, "--train-iters", "4"]
    live, status = on_a_terminal(*short)
    assert status == 0, live
    assert "iteration 4/4" in live
    assert "MFU" in live
    assert "tokens/s" in live
    assert "parameters" in live
    assert "memory (MB)" in live  # other lines scroll above
    assert "elapsed time per iteration" not in live
    lines, status = on_a_terminal(*short, "--terminal", "lines")
    assert status == 0, lines
    assert lines.count("elapsed time per iteration") == 4
    assert "iteration 4/4" not in lines


@pytest.mark.ranks
def test_a_file_gets_the_lines_while_the_terminal_shows_the_view(tmp_path: Path) -> None:
    short = [*RUN, "--train-iters", "4", "--eval-iters", "1", "--terminal", "live"]
    with (tmp_path / "log").open("wb") as log:
        view, status = on_a_terminal(*short, output=log)
    lines = (tmp_path / "log").read_text()
    assert status == 0, view
    assert "│ iteration 4/4" in view
    assert re.search(r"│ validation +\d", view)
    assert "lm loss" not in view
    assert lines.count("elapsed time per iteration") == 4
    assert lines.count("validation loss at") == 2  # on the validation and the test set
    assert not {"│", "\x1b"} & set(lines)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("launcher", "status", "after"),
    [(TORCHRUN, 1, "Traceback"), (ONE_MACHINE, 0, "")],
    ids=["torchrun", "one_machine.sh"],
)
def test_a_run_saves_at_ctrl_c_and_says_how_to_continue(
    tmp_path: Path, launcher: list[str], status: int, after: str
) -> None:
    save = ["--train-iters", "1000000", "--save", str(tmp_path), "--load", str(tmp_path)]
    board = ["--wandb-project", "p", "--wandb-save-dir", str(tmp_path)]
    command = [*launcher, "--nproc-per-node", "2", *RUN[1:], *save, *board]
    text, ended_with = on_a_terminal(*command, "--exit-signal-handler", interrupted=True)
    assert ended_with == status, text
    saved = int((tmp_path / TRACKER).read_text())
    assert "[exiting program after receiving SIGINT.]" in text
    # The view closes complete; our last line is below it, before a traceback of torchrun's own.
    ended = text.rindex("╯\n")
    line = f"iteration {saved} is saved in {tmp_path}: the same command continues from there\n"
    below = text[ended + 2 :]
    assert below.startswith(f"{line}{after}") if after else below == line
    assert f"│ iteration {saved}/1000000" in text[text.rindex("╭─") : ended]
    assert text.count("Traceback") == (1 if after else 0)
