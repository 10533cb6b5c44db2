"""Quantities in the words of a line for people: counts, bytes, ranks."""

from __future__ import annotations

_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def count_text(number: int, what: str) -> str:
    """The number and what it counts, in the plural unless it is one."""
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{number} {what if number == 1 else plural}"


def ranks_text(world_size: int, group_size: int) -> str:
    """The ranks and their groups; a rank alone has none."""
    ranks = count_text(world_size, "rank")
    return ranks if world_size == 1 else f"{ranks} in groups of {group_size}"


def size_text(num_bytes: int, *, like: int | None = None) -> str:
    """Bytes in a unit that leaves a number above 1, or in that of a sum they are a part of."""
    least = num_bytes if like is None else like
    for name, size in _UNITS:
        if least >= size:
            return f"{num_bytes / size:.1f} {name}"
    return f"{num_bytes} bytes"
