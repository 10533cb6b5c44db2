"""Atomic file writes: a file is written under a temporary name and renamed when complete."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paro.errors import UserError, reading


def check_folder(flag: str, folder: Path, advice: str = "") -> None:
    """Raise `UserError` with `advice` unless a folder is there, or if a store does not say so."""
    with reading(f"{flag} {folder}"):
        if not folder.is_dir():
            raise UserError(f"{flag} {folder} is no folder{advice}")


def check_absent(flag: str, path: Path) -> None:
    """Raise `UserError` if a path that is to be written exists."""
    if path.exists() or path.is_symlink():
        raise UserError(f"{flag} {path} exists: remove it or give another name")


def temporary_beside(path: Path) -> Path:
    """Return an unused name in the folder of `path`, for a rename on one disk."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a whole file; readers see its old content or its new one."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path, *, wanted: bool = True) -> Iterator[Path]:
    """Give a temporary path that is renamed to `path` if the block succeeds, else removed.

    If unwanted, an earlier file at `path` is removed instead. Several processes may write the same
    `path` at the same time: readers see a complete file.
    """
    temporary = temporary_beside(path)
    try:
        yield temporary
        if wanted:
            temporary.replace(path)
        else:
            path.unlink(missing_ok=True)
    finally:
        temporary.unlink(missing_ok=True)
