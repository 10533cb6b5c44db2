"""The words of a command line, by flag."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def by_flag(words: Sequence[str]) -> Iterator[list[str]]:
    """Each flag with the words after it; words before the first flag form their own group."""
    group: list[str] = []
    for word in words:
        if word.startswith("--") and group:
            yield group
            group = []
        group.append(word)
    if group:
        yield group
