"""Parts of the GPU check for nine minutes: their limits, and their order when time is short."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tools.bench.gpu_check.running import GRACE_SECONDS

COMMAND_SECONDS = 9 * 60.0  # of a whole command, whatever fails
NOT_REACHED = "not reached"
_AT_END = 8.0  # for the last results and the archive
_LEAST = 0.5  # of a stage's limit: with less it is not begun


class Stage(NamedTuple):
    """Parts that run side by side, and the seconds that they have."""

    letters: str
    seconds: float


QUICK = {
    1: [*map(Stage, ("abc", "n", "k", "p", "q", "r", "f"), (130, 30, 90, 105, 60, 80, 35))],
    2: [*map(Stage, ("s", "t", "m"), (70, 60, 120))],
}


def stages_of(number: int, results: Mapping[str, Any], facts: Mapping[str, str]) -> list[Stage]:
    """Return the stages of a command, without the parts that passed on this machine at this commit.

    Parts without a measurement come first. The second command has those of the first too.
    """

    def rank(letter: str) -> int:
        found = results.get(letter)
        if found is None or NOT_REACHED in found["lines"]:
            return 0
        return 1 + (found["passed"] and found | facts == found)

    known = [stage for n in range(number, 0, -1) for stage in QUICK[n]]
    left = [Stage("".join(x for x in s.letters if rank(x) < 2), s.seconds) for s in known]
    return sorted((s for s in left if s.letters), key=lambda s: min(map(rank, s.letters)))


def course(
    stages: Iterable[Stage], seconds_left: Callable[[], float]
) -> Iterator[tuple[Stage, float | None]]:
    """Yield each stage with the seconds of its commands; None if too few are left to begin it.

    A command that does not stop in time is asked to, then killed: in the stage's time too.
    """
    for stage in stages:
        seconds = min(stage.seconds, seconds_left() - _AT_END)
        yield stage, seconds - 2 * GRACE_SECONDS if seconds >= _LEAST * stage.seconds else None
