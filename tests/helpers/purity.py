"""Holds unmarked tests to their promise: they start no process and, on request, are quick."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

# Tests with one of these marks may start processes.
MAY_START = ("ranks", "process", "gpu", "root", "browser", "verify")
# What Python's own audit calls the ways to start one; multiprocessing's are not among them.
_EVENTS = {"subprocess.Popen", "os.system", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec"}
# What libraries start by themselves: matplotlib lists the fonts when it is first imported.
_LIBRARIES_OWN = ("fc-list",)

_FLOPS = 3e11  # of a core, in fp32
_SIZE = 1024

_pure_test: str | None = None  # the one that runs now


class ProcessStartedError(AssertionError):
    """A test without a mark that allows it started a process."""


def _refuse(what: str) -> None:
    global _pure_test
    if _pure_test is not None:
        name, _pure_test = _pure_test, None  # what reports the failure may start processes
        raise ProcessStartedError(
            f"{name} starts a process ({what}) without a mark: give it @pytest.mark.process, "
            "or ranks if the processes talk to each other"
        )


def install() -> None:
    """Watches this process from now on: an audit hook cannot be removed."""

    def audit(event: str, details: tuple[Any, ...]) -> None:
        if event in _EVENTS and not (event == "subprocess.Popen" and details[0] in _LIBRARIES_OWN):
            _refuse(event)

    start = BaseProcess.start

    def watched(process: BaseProcess) -> None:
        _refuse(f"multiprocessing, {process.name}")
        start(process)

    sys.addaudithook(audit)
    BaseProcess.start = watched  # type: ignore[method-assign, assignment]


@contextmanager
def held(item: pytest.Item) -> Iterator[None]:
    """Refuses processes while a phase of a test runs that has no mark for them."""
    global _pure_test
    before = _pure_test
    _pure_test = None if any(map(item.get_closest_marker, MAY_START)) else item.nodeid
    try:
        yield
    finally:
        _pure_test = before


@contextmanager
def timed(item: pytest.Item, limit: float) -> Iterator[None]:
    """Fails a test whose call takes more processor time than `limit` seconds, or gives a reason.

    The limit is meant for a machine of `_FLOPS`; one that is slower, or is so now, has more.
    """
    began = time.process_time()
    yield
    taken = time.process_time() - began
    if taken <= limit or item.get_closest_marker("slow") is not None:
        return
    allowed = limit * slowness()
    if taken > allowed:
        pytest.fail(
            f"took {taken:.1f} s of processor time, more than {allowed:.2g} s: make it smaller, or "
            'give it @pytest.mark.slow("why")',
            pytrace=False,
        )


def slowness() -> float:
    """How much slower than `_FLOPS` a core multiplies matrices now; at least 1."""
    import torch  # here, because conftest.py says first how many threads it takes

    matrix = torch.ones(_SIZE, _SIZE)
    taken = math.inf
    for _ in range(3):
        began = time.process_time()
        torch.mm(matrix, matrix)
        taken = min(taken, time.process_time() - began)
    return max(1.0, taken * _FLOPS / (2 * _SIZE**3))
