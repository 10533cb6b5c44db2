"""What may watch a training loop: told what begins, and when all is over."""

from __future__ import annotations

from typing import Protocol


class Observer(Protocol):
    """Called by the training thread; must cost next to nothing."""

    def begins(self, what: str, iteration: int) -> None:
        """`what` is training, evaluating or saving; so many iterations are done."""

    def ends(self) -> None:
        """Nothing follows."""
