"""What may watch a training loop: told what begins, and when all is over."""

from __future__ import annotations


class Observer:
    """Called by the training thread; must cost next to nothing."""

    def begins(self, what: str, iteration: int) -> None:
        """`what` is training, evaluating or saving; so many iterations are done."""

    def goes_on(self) -> None:
        """The next micro-batch of what has begun."""

    def ends(self) -> None:
        """Nothing follows."""
