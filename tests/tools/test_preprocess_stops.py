"""Preprocessing that is stopped, killed or out of space leaves the good files and no worker."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.processes import children, lives, wait_for
from tests.helpers.ranks import HANGS_AFTER, ROOT
from tests.tools.test_preprocess_data import NULL, both_files, lines_file, preprocess

pytestmark = pytest.mark.process


def start(text: Path, prefix: Path, *flags: str, **options: object) -> subprocess.Popen[str]:
    """Preprocessing; unless it has other flags, two workers have begun and say how far they are."""
    reads = flags or ("--workers", "2", "--log-interval", "1000")
    words = ["--input", str(text), "--output-prefix", str(prefix), *reads, *NULL]
    process = subprocess.Popen(
        [sys.executable, "tools/preprocess_data.py", *words],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )
    if not flags:
        assert process.stderr.readline().startswith("Processed")
    return process


def workers_of(pid: int) -> list[int]:
    spawned = ((child, Path(f"/proc/{child}/cmdline")) for child in children(pid))
    return [child for child, command in spawned if "spawn_main" in command.read_text()]


@pytest.fixture
def good_files(tmp_path: Path) -> Iterator[Path]:
    """The prefix of a corpus, whose files are the same at the end of the test, and alone."""
    text, prefix = lines_file(tmp_path / "good.jsonl", 10), tmp_path / "out" / "x"
    preprocess(text, "--output-prefix", str(prefix))
    before = both_files(prefix)
    yield prefix
    assert both_files(prefix) == before
    assert len(list(prefix.parent.iterdir())) == 3


@pytest.mark.parametrize(
    ("stop", "status", "told"),
    [
        (signal.SIGKILL, 2, "error: a worker process was killed"),
        (signal.SIGINT, 130, "stopped"),
        (signal.SIGTERM, 130, "stopped"),
    ],
)
def test_a_killed_worker_and_a_signal_are_one_line_and_leave_no_worker(
    tmp_path: Path, good_files: Path, stop: signal.Signals, status: int, told: str
) -> None:
    process = start(lines_file(tmp_path / "a.jsonl", 400_000), good_files)
    workers = workers_of(process.pid)
    assert len(workers) == 2
    os.kill(workers[0] if stop == signal.SIGKILL else process.pid, stop)
    _, err = process.communicate(timeout=HANGS_AFTER)
    assert process.returncode == status
    *others, last = err.splitlines()
    assert last.startswith(f"preprocess_data.py: {told}")
    assert all(line.startswith("Processed") for line in others)
    assert not any(map(lives, workers))


def test_workers_leave_when_the_first_process_is_killed(tmp_path: Path) -> None:
    process = start(lines_file(tmp_path / "a.jsonl", 400_000), tmp_path / "x")
    workers = workers_of(process.pid)
    process.kill()
    process.communicate(timeout=HANGS_AFTER)
    wait_for(lambda: not any(map(lives, workers)))
    assert not list(tmp_path.glob("*.idx"))


def test_a_full_disk_is_one_line_and_leaves_the_good_files(
    tmp_path: Path, good_files: Path
) -> None:
    """Simulated by a limit on file sizes: the system's error differs only in its number."""
    text = lines_file(tmp_path / "a.jsonl", 50_000)
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (65536, 65536))
    process = start(text, good_files, "--workers", "1", preexec_fn=limit)
    _, err = process.communicate(timeout=HANGS_AFTER)
    assert process.returncode == 1
    assert f"{good_files}_text_document.bin cannot be written: File too large" in err
    assert sum(not line.startswith("Processed") for line in err.splitlines()) == 1
