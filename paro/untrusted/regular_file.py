"""Reads untrusted files: regular ones only, and not without a limit."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from paro.errors import UserError, reading

MAX_BYTES = 2**28  # the largest tokenizer.json has a tenth of it


@contextmanager
def open_regular(path: str | Path, what: str = "") -> Iterator[BinaryIO]:
    """An open regular file; `UserError` begins with `what`, or with the path.

    A pipe or a device, which could block or never end, is refused without a wait.
    """
    what = what or str(path)
    with reading(what):
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
        with open(os.open(path, flags), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                kind = "a folder" if stat.S_ISDIR(mode) else "no regular file"
                raise UserError(f"{what} is {kind}: give a file")
            yield file


def check_regular(path: str | Path, what: str = "") -> None:
    """`UserError` unless a library, which opens the file itself, could read it."""
    with open_regular(path, what):
        pass


def read_bytes(path: str | Path, what: str = "", *, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a regular file."""
    what = what or str(path)
    with open_regular(path, what) as file:
        content = file.read(max_bytes + 1)
        size = max(os.fstat(file.fileno()).st_size, len(content))
    if len(content) > max_bytes:
        raise UserError(f"{what} has {size:,} bytes, more than the {max_bytes:,} that may be read")
    return content


def read_text(path: str | Path, what: str = "", *, max_bytes: int = MAX_BYTES) -> str:
    """The content of a regular file as UTF-8."""
    content = read_bytes(path, what, max_bytes=max_bytes)
    with reading(what or str(path)):
        return content.decode("utf-8").replace("\r\n", "\n")
