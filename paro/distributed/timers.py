"""Named timers under Megatron's names; each is a range in a profile too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Timers:
    """Seconds by name since the last `take`, of the names up to a level (--timing-log-level).

    1 times the parts of a step, 2 each micro-batch's. With `synchronize` a timer first lets the
    device come to an end, or it would time the queueing of kernels.
    """

    def __init__(self, level: int = 0, *, synchronize: Callable[[], None] | None = None) -> None:
        self._level = level
        self._synchronize = synchronize or (lambda: None)
        self._seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str, *, level: int = 1) -> Iterator[None]:
        """Times a block as `name`, and names it `paro/<name>` in a profile at any level."""
        with torch.profiler.record_function(f"paro/{name}"):
            if level > self._level:
                yield
                return
            self._synchronize()
            begin = time.perf_counter()
            yield
            self._synchronize()
            self.add(name, time.perf_counter() - begin)

    def add(self, name: str, seconds: float, *, level: int = 0) -> None:
        """Adds what was measured elsewhere."""
        if level <= self._level:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """The seconds since the last call, in the order in which the names came up."""
        seconds, self._seconds = self._seconds, {}
        return seconds


def make_timers(level: int, device: torch.device) -> Timers:
    """Timers that wait for a GPU; at level 0 none does."""
    wait = torch.cuda.synchronize if device.type == "cuda" else None
    return Timers(level, synchronize=wait)
