"""Writes a file under a temporary name and gives it its own name only once it is complete."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def temporary_beside(path: Path) -> Path:
    """An unused name in the folder of `path`, so that a rename to `path` stays on one disk."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name to write to, renamed to `path` when the block ends well and removed when it fails.

    Several processes may write the same `path` at once: readers see one whole file or another.
    """
    temporary = temporary_beside(path)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
