"""Interface for observers of the training loop: called when a phase begins and at the end."""

from __future__ import annotations


class Observer:
    """Its methods are called by the training thread and must cost almost nothing."""

    def begins(self, what: str, iteration: int) -> None:
        """Phase `what` (training, evaluating or saving) begins after `iteration` iterations."""

    def progressed(self) -> None:
        """The next micro-batch of the current phase begins."""

    def ends(self) -> None:
        """The run is over; no further call follows."""
