"""What a schedule sends, by its own steps."""

from __future__ import annotations

from paro.collectives.schedule import Schedule


def sent_fraction(schedule: Schedule, num_places: int, pieces: int, level: int) -> float:
    """Which part of the whole buffer a place sends over `level`."""
    sent = sum(len(schedule.steps[index].send.chunks) for index in schedule.of_level[level])
    return sent / (num_places * pieces)
