"""The words of a command line, by flag."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_FLAG = re.compile(r"--|-[a-zA-Z]+$")


def by_flag(words: Sequence[str]) -> Iterator[list[str]]:
    """Each flag with the words after it; words before the first flag form their own group."""
    group: list[str] = []
    for word in words:
        if group and _FLAG.match(word):
            yield group
            group = []
        group.append(word)
    if group:
        yield group
