"""Output files of tools: complete or not there at all; an error of the system names the file."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from filecmp import cmp
from pathlib import Path
from typing import Any

from paro.errors import UserError, writing
from paro.files.atomic_file import replacing
from paro.report.earlier import set_aside
from paro.report.log import print_line
from paro.text import align


@contextmanager
def output_file(path: Path, *, is_update: bool = False) -> Iterator[Path]:
    """Yield a temporary path, renamed to `path` if the block succeeds; make the folder.

    Other content that is there is kept in FILE.earlier_N, unless the new one is an update of it.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path} cannot be written: it is no regular file")
    with writing(f"{path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            yield temporary
            if is_update or not path.exists() or cmp(path, temporary, shallow=False):
                return
            print_line(f"what {path} held is in {set_aside(path)} now", stream=sys.stderr)


def write_text(path: Path, text: str, *, is_update: bool = False) -> None:
    with output_file(path, is_update=is_update) as temporary:
        # Names of files may have bytes that are no UTF-8.
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_json(path: Path | None, value: Any, *, is_update: bool = False) -> None:
    """Write a value as JSON; nothing without a path, as of a flag that is not given."""
    if path is not None:
        write_text(path, json.dumps(value, indent=1) + "\n", is_update=is_update)


def text_table(rows: Iterable[Mapping[str, str]], left: Collection[int] = (0,)) -> str:
    """Format rows below the names of the first one's fields, aligned as `align` does."""
    cells = [*rows]
    return align([[*cells[0]], *([*row.values()] for row in cells)], left)


def markdown_table(heads: str, rows: Iterable[Sequence[object]]) -> list[str]:
    """Format a table in Markdown; `heads` are of its columns, with | between them."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return [f"| {heads} |", f"|{'---|' * (heads.count('|') + 1)}", *lines]


def print_json(value: Any, *, indent: int | None = None) -> None:
    """Print a value as JSON, of any length; a terminal acts upon no character of it."""
    print_line(json.dumps(value, indent=indent).replace("\x7f", r"\u007f"), whole=True)
