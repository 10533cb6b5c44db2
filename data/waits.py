"""Waits with one limit: each says after some seconds what it waits for, and ends past it."""

from __future__ import annotations

import errno
import sys
import time
from typing import ClassVar

TELLS_AFTER_SECONDS = 10.0


class Wait:
    """One wait for `what`; who waits calls `goes_on` every now and then."""

    limit_seconds: ClassVar[float] = 600.0  # of all waits; a run sets --distributed-timeout-minutes

    def __init__(self, what: str) -> None:
        self._what = what
        self._begin = time.monotonic()
        self._is_told = False

    def goes_on(self) -> None:
        """Says once what is waited for; `TimeoutError`, one line with status 1, past the limit."""
        stood = time.monotonic() - self._begin
        if stood > self.limit_seconds:
            raise TimeoutError(
                errno.ETIMEDOUT,
                f"waited {stood:.0f} s for {self._what}; "
                "--distributed-timeout-minutes is the limit",
            )
        if stood > TELLS_AFTER_SECONDS and not self._is_told:
            self._is_told = True
            sys.stderr.write(f"waiting for {self._what}\n")
            sys.stderr.flush()
