"""A data-loading process that dies ends the run with one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.ranks import ROOT
from tests.helpers.training import TINY

ENDLESS = "--train-iters 1000000 --eval-iters 0 --log-interval 1"


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.ranks
def test_a_killed_reader_is_one_line_and_status_2() -> None:
    flags = TINY.replace("--num-workers 0", "--num-workers 1").split()
    command = [sys.executable, "pretrain_llama.py", *flags, *ENDLESS.split()]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            if "consumed samples" in line:
                break
        readers = children_of(process.pid)
        assert readers
        for reader in readers:
            os.kill(reader, signal.SIGKILL)
        process.stdout.read()
        said = process.stderr.read()
    assert process.returncode == 2
    (line,) = [text for text in said.splitlines() if text.startswith("pretrain_llama.py: ")]
    assert "a process that reads data ahead is gone" in line
    assert "Traceback" not in said
