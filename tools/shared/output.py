"""Output files of tools: complete or not there at all; an error of the system names the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data.atomic_file import replacing
from paro.errors import writing
from paro.report.log import print_line


@contextmanager
def output_file(path: Path) -> Iterator[Path]:
    """A temporary path, renamed to `path` if the block succeeds; makes the folder."""
    with writing(f"{path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            yield temporary


def write_text(path: Path, text: str) -> None:
    with output_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path | None, value: Any) -> None:
    """Writes a value as JSON; nothing without a path, as of a flag that is not given."""
    if path is not None:
        write_text(path, json.dumps(value, indent=1) + "\n")


def print_json(value: Any, *, indent: int | None = None) -> None:
    """Prints a value as JSON, of any length; a terminal acts upon no character of it."""
    print_line(json.dumps(value, indent=indent).replace("\x7f", r"\u007f"), whole=True)
