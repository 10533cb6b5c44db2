"""The only way to print: on the first rank, or on the last rank like Megatron's log line."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from paro.errors import printable, printing, shown

if TYPE_CHECKING:  # these load torch and rich, and programs without them print too
    from paro.distributed.control import Control
    from paro.report.live_view import LiveView


def print_line(
    *lines: str, stream: TextIO | None = None, end: str = "\n", whole: bool = False
) -> None:
    """Print lines to `stream`, by default standard output, and flush it.

    Lines may contain names from files and flags: control characters are escaped, long lines cut.
    `whole` cuts no line, for a text that the user asked for. On another `stream`, which carries
    dispensable text such as progress, a write error loses the lines.
    """
    text = "\n".join(lines)
    # One write: with a separate write for the newline, lines of different ranks would mix.
    text = (printable(text) if whole else shown(text)) + end
    if stream is not None:
        with suppress(OSError):
            print(text, end="", flush=True, file=stream)
        return
    with printing():
        print(text, end="", flush=True)


def set_logging_level(level: int | None) -> None:
    """Make Python's root logger, which libraries log to, print messages from `level` on."""
    if level is not None:
        logging.basicConfig()  # adds a handler if there is none
        logging.getLogger().setLevel(level)


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Printer that knows this process's rank; made once and passed to all code that prints.

    If standard output fails (reader ended, disk full, terminal closed), lines go to standard
    error from then on. If standard error fails too, nothing is printed: the training continues.
    """

    rank: int = 0
    world_size: int = 1
    one_speaker: bool = False  # True: the first rank prints the last rank's lines too
    write: Callable[[str], None] = print_line

    @property
    def is_last(self) -> bool:
        """True if this rank prints the log line."""
        return self.rank == (0 if self.one_speaker else self.world_size - 1)

    def show(self, message: str) -> None:
        """Print on every rank that calls this method."""
        try:
            self.write(shown(message))
        except OSError as error:
            sys.stdout = sys.stderr
            try:
                print_line(f"[Rank {self.rank}] {error.strerror}: the log goes on here", message)
            except OSError:
                sys.stdout = open(os.devnull, "w", errors="backslashreplace")  # noqa: SIM115

    def log0(self, *messages: str) -> None:
        """Print on the first rank."""
        for message in messages if self.rank == 0 else ():
            self.show(message)

    def log_last(self, message: str) -> None:
        """Print on the last rank, where scripts look for the log line."""
        if self.is_last:
            self.show(message)


def live_is_wanted(choice: str, control: Control) -> bool:
    """Decide on the live view; by default on a terminal shared by one node. Collective."""
    world = control.world
    if choice == "lines" or importlib.util.find_spec("rich") is None:
        return False
    if choice == "live":
        return True
    console = importlib.import_module("rich.console").Console()
    shared = console.is_terminal and not console.is_dumb_terminal
    return bool(control.gather(shared)[0]) and world.ranks_per_node == world.size


class Terminal:
    """Output of a rank: printed lines, which scroll above the live view once a view is open.

    If only standard error is a terminal, the view is drawn on standard error; lines still go to
    standard output, a file or pipe then.
    """

    def __init__(self) -> None:
        self.view: LiveView | None = None
        self.keeps_lines = sys.stderr.isatty() and not sys.stdout.isatty()

    def show(self, message: str) -> None:
        if self.view is not None and not self.keeps_lines:
            try:
                self.view.show(message)
                return
            except Exception:  # for example: the terminal is closed
                with suppress(Exception):
                    self.view.close()
                self.view = None
        print_line(message)
