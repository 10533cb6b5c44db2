"""Text for messages: printable and of bounded length; lists, counts, bytes, ranks and tables."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

_MAX_LINE_CHARS = 1900  # with the name of the program before it, below 2,000
_MAX_SHOWN_CHARS = 10_000  # a blend of a hundred corpora is whole
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def printable(text: str) -> str:
    """Return the text with every character escaped that a terminal would act upon or hide.

    Names in files and flags may hold ANSI escapes, or marks that reverse the direction of text.
    Ends of lines and tabs are left: the layout of what is printed.
    """
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character in "\n\t"
        else character.encode("unicode_escape").decode()
        for character in text
    )


def is_word(text: str) -> bool:
    """Return whether a command line and a file's name can have the text.

    It has no NUL and no half of a character of two; bytes that are no UTF-8 are allowed.
    """
    return re.search("[\0\ud800-\udc7f\udd00-\udfff]", text) is None


def one_line(text: str, longest: int = _MAX_LINE_CHARS) -> str:
    """Return the text as one printable line of at most `longest` characters, its middle cut out."""
    return _cut(printable(" ".join(text.split())), longest)


def shown(text: str) -> str:
    """What a terminal gets of a text: printable lines of at most `_MAX_SHOWN_CHARS` characters."""
    text = printable(text)
    if len(text) <= _MAX_SHOWN_CHARS:
        return text
    return "\n".join(_cut(line, _MAX_SHOWN_CHARS) for line in text.split("\n"))


def _cut(line: str, longest: int) -> str:
    half = (longest - 5) // 2
    return line if len(line) <= longest else f"{line[:half]} ... {line[-half:]}"


def listed(names: Sequence[str]) -> str:
    """Return the names as an English list: `a`, `a and b`, `a, b and c`."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def count_text(number: int, what: str) -> str:
    """Return the number and a noun, in the plural unless the number is 1."""
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{number} {what if number == 1 else plural}"


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
