"""A data-loading process that dies, or data that shrink, end the run with one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.test_training import write_corpus
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


@pytest.mark.verify
@pytest.mark.ranks
@pytest.mark.parametrize("num_workers", [0, 1])
def test_data_that_shrink_end_all_ranks_with_one_line(tmp_path: Path, num_workers: int) -> None:
    write_corpus(tmp_path / "corpus", list(range(16)) * 10_000)
    flags = TINY.replace("--mock-data", f"--data-path {tmp_path}/corpus --split 1,0,0")
    flags = flags.replace("--num-workers 0", f"--num-workers {num_workers}")
    command = ["bash", "examples/one_machine.sh", "--nproc-per-node", "2", "pretrain_llama.py"]
    command = [*command, *flags.split(), *ENDLESS.split()]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            if "consumed samples" in line:
                break
        os.truncate(tmp_path / "corpus.bin", 100)
        process.stdout.read()  # until every rank, which holds the pipe open, is gone
        said = process.stderr.read()
    assert process.returncode == 2
    told = f"{tmp_path}/corpus.bin has 100 bytes and had 320,000 when it was opened"
    lines = {text for text in said.splitlines() if text.startswith("pretrain_llama.py: error: ")}
    assert any(line.startswith(f"pretrain_llama.py: error: {told}") for line in lines)
    assert "Traceback" not in said
