"""Timers with Megatron's names, ranges of a profile, and the time of an action."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch


class Timers:
    """Seconds by name since the last `take`, for timers up to `level` (--timing-log-level).

    Level 1 times the parts of a step, level 2 those of each micro-batch. `synchronize` is called
    before a timer starts and stops: it must wait for the device, or only kernel launches are timed.
    """

    def __init__(self, level: int = 0, *, synchronize: Callable[[], None] | None = None) -> None:
        self._level = level
        self._synchronize = synchronize or (lambda: None)
        self._seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str, *, level: int = 1) -> Iterator[None]:
        """Time a block as `name`; in a profile it is the range `paro/<name>`, at any level."""
        with profile_range(name):
            if level > self._level:
                yield
                return
            self._synchronize()
            begin = time.perf_counter()
            yield
            self._synchronize()
            self.add(name, time.perf_counter() - begin)

    def add(self, name: str, seconds: float, *, level: int = 0) -> None:
        """Add seconds that were measured by the caller."""
        if level <= self._level:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return the seconds by name since the last call, in the order of first use."""
        seconds, self._seconds = self._seconds, {}
        return seconds


class ActionTime(NamedTuple):
    """Seconds of an action."""

    wall: float
    cpu: float  # CPU seconds of all threads of this process


def time_of(action: Callable[[], object], device: torch.device) -> ActionTime:
    """Measure the seconds of an action, including its work on a GPU."""
    synchronize(device)
    begin, cpu_begin = time.perf_counter(), time.process_time()
    action()
    synchronize(device)
    return ActionTime(time.perf_counter() - begin, time.process_time() - cpu_begin)


def synchronize(device: torch.device) -> None:
    """Wait for all work on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_NOTHING = nullcontext()
_PROFILE = SimpleNamespace(of_all_threads=False)


def record_ranges(on: bool) -> None:
    """Note that a profile of all threads begins or ends: torch has no query for it."""
    _PROFILE.of_all_threads = on


def profile_range(name: str) -> AbstractContextManager[Any]:
    """Return a context manager whose block is the range `paro/<name>` in a profile.

    It does nothing without a profile: `record_function` would take 5 microseconds a block even
    then, which adds up where units are small.
    """
    if _PROFILE.of_all_threads or torch.autograd._profiler_enabled():
        return torch.profiler.record_function(f"paro/{name}")
    return _NOTHING
