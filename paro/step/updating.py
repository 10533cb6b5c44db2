"""Decides when all-gathers of updated parameters are queued, event by event."""

# [Note: updated parameters]
# A step ends with the update, and the next forward is the first to read what it changed. The
# all-gather of a unit's updated parameters may be queued at once, when links have most time for it.
# Or it is queued so many units ahead of the unit's first use, behind the gathers that an earlier
# unit's forward queues: then no gather is queued behind what only later units need. That is faster
# where collectives begin in the order in which they are queued, on whichever stream
# (planning/simulation.py). A unit is gathered `prefetch_units` ahead, and behind its own
# updates, which are therefore queued at least one unit further ahead.

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paro.step.actions import Action, Buckets, Verb


class UpdatingPolicy:
    """Answers the events of updates and forwards with the all-gathers to queue, in order.

    `needed` are the buffers that each unit, or rotating part, reads, in forward order. With `ahead`
    None all-gathers are queued at once. A bucket is queued as many units further ahead as it has
    other buffers: it is sent while the bucket before it computes.
    """

    def __init__(
        self, needed: Sequence[Iterable[int]], ahead: int | None, buckets: Buckets | None = None
    ) -> None:
        self._first_use: dict[int, int] = {}
        for index, buffers in enumerate(needed):
            for buffer in buffers:
                self._first_use.setdefault(buffer, index)
        self._num_units = len(needed)
        self._ahead = self._num_units if ahead is None else ahead
        self._buckets = buckets or Buckets()
        for first, *others in filter(None, self._buckets.buckets):
            self._first_use[first] -= len(others)
        self._updated: list[int] = []  # buffers, or buckets, whose all-gather is not queued yet

    def updated(self, buffer: int) -> list[Action]:
        """After the update of a buffer."""
        self._updated += self._buckets.add(buffer)
        return self._queue(self._ahead - 1)

    def before_forward(self, index: int) -> list[Action]:
        """Before a unit's forward, of training or of an evaluation, and behind its gathers."""
        return self._queue(index + self._ahead)

    def flush(self) -> list[Action]:
        """Before parameters are read outside of a forward."""
        return self._queue(self._num_units)

    def _queue(self, last: int) -> list[Action]:
        """Return the all-gathers of what the units up to the last one read."""
        due = [buffer for buffer in self._updated if self._first_use[buffer] <= last]
        self._updated = [buffer for buffer in self._updated if self._first_use[buffer] > last]
        return [(Verb.GATHER_UPDATED, buffer) for buffer in due]
