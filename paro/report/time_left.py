"""How long a run still takes, by the clock on the wall, and times as text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

_ITERATIONS = 1000  # a change of pace shows, and one slow save among them does not


def duration(seconds: float) -> str:
    """Return seconds as 1:02:03, preceded by the days if there are any."""
    whole = max(0, round(seconds))
    days, rest = divmod(whole, 86400)
    text = f"{rest // 3600}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days} d {text}" if days else text


@dataclass(slots=True)
class TimeLeft:
    """Takes the end of every iteration; what comes between two, such as a save, counts too."""

    train_iters: int
    clock: Callable[[], float] = time.monotonic
    ends: deque[float] = field(default_factory=lambda: deque(maxlen=_ITERATIONS + 1))

    def after(self, iteration: int, *, seconds: float) -> float:
        """Return seconds until the run ends, when an iteration that took `seconds` has ended."""
        self.ends.append(self.clock())
        if len(self.ends) > 1:
            seconds = (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)
        return (self.train_iters - iteration) * seconds
