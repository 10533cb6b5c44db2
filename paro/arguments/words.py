"""The words of a command line, by flag."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence

_FLAG = re.compile(r"--|-[a-zA-Z]+$")
_WIDTH = 80


def starts_flag(word: str) -> bool:
    """Return whether a word of a command line is a flag, and no value such as -1."""
    return _FLAG.match(word) is not None


def by_flag(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield each flag with the words after it; words before the first flag form their own group."""
    group: list[str] = []
    for word in words:
        if group and starts_flag(word):
            yield group
            group = []
        group.append(word)
    if group:
        yield group


def wrapped(groups: Iterable[Sequence[str]]) -> list[str]:
    """Indented lines of the groups of `by_flag` as a shell reads them, none of them cut."""
    lines: list[str] = []
    for part in map(shlex.join, groups):
        if lines and len(lines[-1]) + len(part) < _WIDTH:
            lines[-1] += f" {part}"
        else:
            lines.append(f"    {part}")
    return lines
