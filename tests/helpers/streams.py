"""Standard streams that fail: a pipe without a reader, a full disk, a terminal that is closed."""

from __future__ import annotations

import errno
import io
import os

# How a write to a standard stream fails, and what a test is called by it.
FAILURES = {"reader": errno.EPIPE, "disk": errno.ENOSPC, "terminal": errno.EIO}


class Failing(io.StringIO):
    """A text stream of which every write fails with an error, once `fails` is set."""

    def __init__(self, number: int, *, fails: bool = True) -> None:
        super().__init__()
        self._number = number
        self.fails = fails

    def write(self, text: str) -> int:
        if self.fails:
            raise OSError(self._number, os.strerror(self._number))
        return super().write(text)

    def fileno(self) -> int:
        return 2  # Python's own dumps of stacks need a real file
