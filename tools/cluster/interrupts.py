"""Signals that end a program: turned into exceptions, so that it cleans up, or deferred."""

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
    """Install a handler for the ending signals during a block; ignored ones stay ignored.

    Only the main thread can do that: in any other thread this has no effect.
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
            # A handler that was not installed from Python is None and cannot be restored.
            signal.signal(number, before[number] or signal.SIG_DFL)


def exit_by_signal(number: int, frame: FrameType | None) -> None:
    """End the program with the status a shell would report, running every `finally`."""
    sys.exit(128 + number)


@contextmanager
def noting() -> Iterator[Callable[[], None]]:
    """Record ending signals during a block, which calls the yielded function to check.

    An exception from a signal handler could arrive while a process is being started, which would
    then be lost track of.
    """
    noted: list[int] = []

    def end_if_noted() -> None:
        if noted:
            sys.exit(128 + noted[0])

    with handling(lambda number, _: noted.append(number)):
        yield end_if_noted
