"""Preprocessing that is stopped, killed or out of space leaves the good files and no worker."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.ranks import HANGS_AFTER
from tests.tools.test_preprocess_data import NULL, both_files, lines_file
from tools.preprocess_data import main

pytestmark = pytest.mark.process


def start(*flags: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "tools/preprocess_data.py", *flags],
        cwd=Path(__file__).parents[2],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    with_spawn = [int(word) for word in text.split()]
    return [
        child
        for child in with_spawn
        if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
    ]


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + HANGS_AFTER
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def good_files(tmp_path: Path) -> Path:
    lines_file(tmp_path / "good.jsonl", 10)
    prefix = tmp_path / "out" / "x"
    flags = ["--output-prefix", str(prefix), "--workers", "1", *NULL]
    assert main(["--input", str(tmp_path / "good.jsonl"), *flags]) == 0
    return prefix


def test_a_killed_worker_is_one_line_and_leaves_the_good_files(
    tmp_path: Path, good_files: Path
) -> None:
    before = both_files(good_files)
    lines_file(tmp_path / "a.jsonl", 400_000)
    process = start("--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(good_files),
                    "--workers", "2", "--log-interval", "1000", *NULL)  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline().startswith("Processed")
    os.kill(children(process.pid)[0], signal.SIGKILL)
    _, err = process.communicate(timeout=HANGS_AFTER)
    assert process.returncode == 2
    last = err.splitlines()[-1]
    assert last.startswith("preprocess_data.py: error: a worker process was killed")
    assert all(line.startswith("Processed") for line in err.splitlines()[:-1])
    assert both_files(good_files) == before
    assert len(list(good_files.parent.iterdir())) == 3


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_stopping_it_is_one_line_and_leaves_no_worker(
    tmp_path: Path, good_files: Path, stop: signal.Signals
) -> None:
    before = both_files(good_files)
    lines_file(tmp_path / "a.jsonl", 400_000)
    process = start("--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(good_files),
                    "--workers", "2", "--log-interval", "1000", *NULL)  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline().startswith("Processed")
    workers = children(process.pid)
    assert len(workers) == 2
    process.send_signal(stop)
    _, err = process.communicate(timeout=HANGS_AFTER)
    assert process.returncode == 130
    assert err.splitlines()[-1].startswith("preprocess_data.py: stopped")
    assert "Traceback" not in err
    assert both_files(good_files) == before
    assert len(list(good_files.parent.iterdir())) == 3
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


def test_workers_leave_when_the_first_process_is_killed(tmp_path: Path) -> None:
    lines_file(tmp_path / "a.jsonl", 400_000)
    process = start("--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "x"),
                    "--workers", "2", "--log-interval", "1000", *NULL)  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline().startswith("Processed")
    workers = children(process.pid)
    process.kill()
    process.communicate(timeout=HANGS_AFTER)
    wait_for(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
    assert not list(tmp_path.glob("*.idx"))


def test_a_full_disk_is_one_line_and_leaves_the_good_files(
    tmp_path: Path, good_files: Path
) -> None:
    """Simulated by a limit on file sizes: the system's error differs only in its number."""
    before = both_files(good_files)
    lines_file(tmp_path / "a.jsonl", 50_000)
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (65536, 65536))
    process = start("--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(good_files),
                    "--workers", "1", *NULL, preexec_fn=limit)  # fmt: skip
    _, err = process.communicate(timeout=HANGS_AFTER)
    assert process.returncode == 1
    assert f"{good_files}_text_document.bin cannot be written: File too large" in err
    assert sum(not line.startswith("Processed") for line in err.splitlines()) == 1
    assert both_files(good_files) == before
    assert len(list(good_files.parent.iterdir())) == 3
