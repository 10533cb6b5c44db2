"""Where a run's output goes: lines that scroll, or a view that stays, drawn by the first rank."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from paro.distributed.control import Control
from paro.report.log import print_line
from paro.report.record import RunFacts


def live_is_wanted(choice: str, control: Control) -> bool:
    """Whether to draw: by itself on a terminal that one node's ranks share. Collective."""
    world = control.world
    if choice == "lines" or importlib.util.find_spec("rich") is None:
        return False
    if choice == "live":
        return True
    console = importlib.import_module("rich.console").Console()
    shared = console.is_terminal and not console.is_dumb_terminal
    return bool(control.gather(shared)[0]) and world.ranks_per_node == world.size


class Terminal:
    """Prints lines, above the view once there is one."""

    def __init__(self) -> None:
        self._view: Any = None

    def show(self, message: str) -> None:
        if self._view is None:
            print_line(message)
        else:
            self._view.show(message)

    def open_view(
        self, facts: RunFacts, *, title: str, placement: Sequence[str], bytes_before: int
    ) -> Any:
        """The view, on this rank."""
        module = importlib.import_module("paro.report.live_view")
        self._view = module.LiveView(
            facts, title=title, placement=placement, bytes_before=bytes_before
        )
        return self._view
