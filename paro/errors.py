"""Several mistakes of a user, found together and reported together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class MistakesError(ValueError):
    """One mistake is its own line; of several, a first line says how many there are.

    An `example` comes last, in lines of its own.
    """

    def __init__(self, mistakes: Iterable[str], *, example: str = "") -> None:
        lines = [" ".join(mistake.split()) for mistake in mistakes]
        assert lines, "no mistake, no error"
        if len(lines) > 1:
            lines = [f"{len(lines)} mistakes:", *(f"  {line}" for line in lines)]
        super().__init__("\n".join([*lines, example] if example else lines))


def listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
