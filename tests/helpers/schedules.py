"""The chunks that a schedule sends, from its steps."""

from __future__ import annotations

from paro.collectives.schedule import Schedule


def sent_fraction(schedule: Schedule, num_places: int, num_chunks: int, level: int) -> float:
    """The part of the whole buffer that a position sends over `level`."""
    sent = sum(len(schedule.steps[index].send.chunks) for index in schedule.of_level[level])
    return sent / (num_places * num_chunks)
