"""The only way to print: on the first rank, or on the last one like Megatron's log line."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from paro.errors import printing
from paro.text import printable, shown


def print_line(
    *lines: str, stream: TextIO | None = None, end: str = "\n", whole: bool = False
) -> None:
    """Prints lines to `stream`, by default standard output, and flushes it.

    They may contain names from files and flags: characters that a terminal would act upon are
    escaped, and long lines are cut. With `whole`, for a text that the user asked for, none is cut.
    """
    text = "\n".join(lines)
    # One write: with a separate write for the newline, lines of different ranks would mix.
    text = (printable(text) if whole else shown(text)) + end
    if stream is not None:
        print(text, end="", flush=True, file=stream)
        return
    with printing():
        print(text, end="", flush=True)


def set_logging_level(level: int | None) -> None:
    """Makes Python's root logger, which libraries log to, print messages from `level` on."""
    if level is not None:
        logging.basicConfig()  # adds a handler if there is none
        logging.getLogger().setLevel(level)


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Prints depending on this process's rank; made once and passed to all code that prints."""

    rank: int = 0
    world_size: int = 1
    one_speaker: bool = False  # the first rank also prints the last rank's lines
    write: Callable[[str], None] = print_line

    @property
    def is_last(self) -> bool:
        """Whether this rank prints the log line."""
        return self.rank == (0 if self.one_speaker else self.world_size - 1)

    def show(self, message: str) -> None:
        """Prints on every rank that calls it."""
        self.write(shown(message))

    def log0(self, message: str) -> None:
        """Prints on the first rank."""
        if self.rank == 0:
            self.show(message)

    def log_last(self, message: str) -> None:
        """Prints on the last rank, where scripts look for the log line."""
        if self.is_last:
            self.show(message)
