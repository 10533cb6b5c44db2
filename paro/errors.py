"""An error that reports several user mistakes at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class MistakesError(ValueError):
    """One or more user mistakes, one per line; several are preceded by a line with their number.

    An `example` follows on its own lines.
    """

    def __init__(self, mistakes: Iterable[str], *, example: str = "") -> None:
        lines = [" ".join(mistake.split()) for mistake in mistakes]
        assert lines, "no mistake, no error"
        if len(lines) > 1:
            lines = [f"{len(lines)} mistakes:", *(f"  {line}" for line in lines)]
        super().__init__("\n".join([*lines, example] if example else lines))


def listed(names: Sequence[str]) -> str:
    """The names as an English list: `a`, `a and b`, `a, b and c`."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
