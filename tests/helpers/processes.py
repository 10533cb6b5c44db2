"""Processes of this machine: new ones, whether they live, their children, and waits for them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.helpers.ranks import ROOT
from tests.helpers.warm_process import HANGS_AFTER


def lives(pid: int) -> bool:
    """Whether a process exists and is more than an exit status that nobody has read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    """The processes that one has started; of one that is gone, none."""
    try:
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(word) for word in words]


def wait_for(is_so: Callable[[], object], seconds: float = HANGS_AFTER) -> None:
    """Waits until something is so; fails if it is not in this time."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


def python_apart(program: str, *words: str, **environment: str) -> str:
    """What a program prints in a new Python, which succeeds and whose Triton does not interpret."""
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=ROOT,
        env=own | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
