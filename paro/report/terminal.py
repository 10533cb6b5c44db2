"""Terminal output of a run: scrolling lines, or a live view drawn by the first rank."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from paro.distributed.control import Control
from paro.report.log import print_line
from paro.report.record import RunFacts


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
    """Output of a rank: lines, above the view once it is open.

    Where only standard error is a terminal, a view is drawn there, and the lines still go to
    standard output: to the file or the pipe that it is.
    """

    def __init__(self) -> None:
        self._view: Any = None
        self.keeps_lines = sys.stderr.isatty() and not sys.stdout.isatty()

    def show(self, message: str) -> None:
        if self._view is not None and not self.keeps_lines:
            try:
                self._view.show(message)
                return
            except Exception:  # for example: the terminal is closed
                with suppress(Exception):
                    self._view.close()
                self._view = None
        print_line(message)

    def open_view(
        self, facts: RunFacts, *, title: str, placement: Sequence[str], bytes_before: int
    ) -> Any:
        """Open the live view on this rank and return it."""
        module = importlib.import_module("paro.report.live_view")
        console = module.LiveConsole(stderr=self.keeps_lines)
        self._view = module.LiveView(
            facts, title=title, placement=placement, bytes_before=bytes_before, console=console
        )
        return self._view
