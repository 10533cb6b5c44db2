"""Signals that end a program: turned into exceptions, so that it cleans up, or held off."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Handler = Callable[[int, FrameType | None], Any] | int


@contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Handles the ending signals so for a block; signals that are ignored already stay so.

    Only the main thread may do that: in another one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in ENDING}
    handled = [number for number in ENDING if before[number] is not signal.SIG_IGN]
    try:
        for number in handled:
            signal.signal(number, handler)
        yield
    finally:
        for number in handled:
            # What was not installed from Python is None and cannot be put back.
            signal.signal(number, before[number] or signal.SIG_DFL)


def exit_by_signal(number: int, frame: FrameType | None) -> None:
    """Ends the program as a shell would report it, but through every `finally`."""
    sys.exit(128 + number)


@contextmanager
def noting() -> Iterator[Callable[[], None]]:
    """Only notes ending signals for a block, which asks for them by calling what it gets.

    An exception out of a handler can come while a process is being started, and then nobody knows
    of the process.
    """
    noted: list[int] = []

    def end_if_noted() -> None:
        if noted:
            sys.exit(128 + noted[0])

    with handling(lambda number, _: noted.append(number)):
        yield end_if_noted
