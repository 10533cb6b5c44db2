"""The one way to print: on the first rank, or on the last as Megatron's log line does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass


def print_line(message: str) -> None:
    """Print to standard output."""
    # One write: with a separate one for the end of the line, ranks' lines would run together.
    print(message + "\n", end="", flush=True)


def set_logging_level(level: int | None) -> None:
    """Makes Python's root logger print messages from `level` on, which libraries log to."""
    if level is not None:
        logging.basicConfig()  # a handler, where nobody has set one
        logging.getLogger().setLevel(level)


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Made once from this process's place among the ranks, and handed to whoever has to speak."""

    rank: int = 0
    world_size: int = 1
    one_speaker: bool = False  # the first rank prints what the last one would, too
    show: Callable[[str], None] = print_line

    @property
    def is_last(self) -> bool:
        """Whether this rank prints the log line."""
        return self.rank == (0 if self.one_speaker else self.world_size - 1)

    def log0(self, message: str) -> None:
        """Print on the first rank."""
        if self.rank == 0:
            self.show(message)

    def log_last(self, message: str) -> None:
        """Print on the last rank, which is where scripts look for the log line."""
        if self.is_last:
            self.show(message)
