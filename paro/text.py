"""Text for messages: lists, bytes, ranks and tables."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from paro.errors import count_text

_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def listed(names: Sequence[str]) -> str:
    """Return the names as an English list: `a`, `a and b`, `a, b and c`."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def ranks_text(world_size: int, group_size: int) -> str:
    """Return the number of ranks and the group size; no groups for a single rank."""
    ranks = count_text(world_size, "rank")
    if world_size == 1:
        return ranks
    return f"{ranks} in {'one group' if group_size == world_size else f'groups of {group_size}'}"


def size_text(num_bytes: int, *, like: int | None = None) -> str:
    """Return the bytes in a unit in which they are at least 1, or in which `like` is at least 1."""
    least = num_bytes if like is None else like
    for name, size in _UNITS:
        if least >= size:
            return f"{num_bytes / size:.1f} {name}"
    return f"{num_bytes} bytes"


def align(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Return a line for each row of equally many cells; the columns `left` are left-aligned."""
    columns = []
    for index, cells in enumerate(zip(*rows, strict=True)):
        justify = str.ljust if {index, index - len(rows[0])} & {*left} else str.rjust
        columns.append([justify(cell, max(map(len, cells))) for cell in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))
