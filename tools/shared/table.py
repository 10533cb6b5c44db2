"""Tables as text."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def align(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """A line for each row of equally many cells; the columns `left` are left-aligned."""
    columns = []
    for index, cells in enumerate(zip(*rows, strict=True)):
        justify = str.ljust if {index, index - len(rows[0])} & {*left} else str.rjust
        columns.append([justify(cell, max(map(len, cells))) for cell in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))
