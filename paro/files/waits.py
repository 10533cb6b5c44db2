"""Waits with a limit: each says after some seconds what it waits for; locks, tried without."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from paro.errors import shown

NOTICE_AFTER_SECONDS = 10.0
_POLL_SECONDS = 0.02


class LimitedWait:
    """A wait for `what`; the waiting loop calls `check` in every turn.

    It may take `most_seconds`, or `limit_seconds` if that is None.
    """

    limit_seconds: ClassVar[float] = 600.0  # for all waits; runs set it by their timeout flag

    def __init__(self, what: str, most_seconds: float | None = None) -> None:
        self._what = what
        self._most_seconds = most_seconds
        self._begin = time.monotonic()
        self._has_noted = False

    def check(self, why: str = "") -> None:
        """Print the wait once, with the reason; `TimeoutError` with one line past the limit."""
        what = f"{self._what}{why}"
        waited = time.monotonic() - self._begin
        flag, limit = "; --distributed-timeout-minutes is the limit", self.limit_seconds
        if self._most_seconds is not None:
            flag, limit = "", self._most_seconds
        if waited > limit:
            raise TimeoutError(errno.ETIMEDOUT, f"waited {waited:.0f} s for {what}{flag}")
        if waited > NOTICE_AFTER_SECONDS and not self._has_noted:
            self._has_noted = True
            sys.stderr.write(shown(f"waiting for {what}\n"))
            sys.stderr.flush()


def try_lock(descriptor: int) -> bool:
    """Lock an open file or folder for its process; return False if another process holds it.

    The system releases the lock when the descriptor is closed, or the process ends.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_lock(descriptor: int, holder: str) -> None:
    """Lock as `try_lock` does, once another process has released it; `TimeoutError` at the limit.

    `holder` names that process in messages.
    """
    wait = LimitedWait(holder)
    while not try_lock(descriptor):
        wait.check()
        time.sleep(_POLL_SECONDS)


@contextmanager
def claimed(folder: Path, most_seconds: float = 0.0) -> Iterator[bool]:
    """Hold a folder's lock; give False if another process holds it, or has removed the folder.

    A process id in its name would not do: containers that share the folder have ids of their own.
    The lock is tried for `most_seconds`, at least once.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    end = time.monotonic() + most_seconds
    try:
        while not (is_ours := try_lock(descriptor)) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        yield is_ours and folder.exists()
    finally:
        os.close(descriptor)
