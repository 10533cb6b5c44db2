"""Renames an earlier run's results that a new run would overwrite, under the next free number."""

# A file becomes FILE.earlier_1, then FILE.earlier_2; what a folder holds goes into its earlier_1.

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

MARK = "earlier_"


def next_number(folder: Path, before: str = "") -> int:
    """Return the next unused N for names `<before>earlier_N` in a folder."""
    if not folder.is_dir():
        return 1
    pattern = re.compile(rf"{re.escape(before)}{MARK}(\d{{1,9}})(?!\d)", re.ASCII)
    matches = (pattern.match(path.name) for path in folder.iterdir())
    return max((int(match[1]) for match in matches if match), default=0) + 1


def earlier_file(path: Path) -> Path:
    """Return the next unused `<path>.earlier_N`, in the same folder."""
    before = f"{path.name}."
    return path.with_name(f"{before}{MARK}{next_number(path.parent, before)}")


def set_aside(path: Path) -> Path | None:
    """Rename a file that will be replaced; return the new name, or None if there is no file."""
    return path.rename(earlier_file(path)) if path.is_file() else None


def set_aside_in(folder: Path, files: Iterable[Path]) -> Path | None:
    """Move files below `folder` into its next earlier_N; return the path, or None without files."""
    sources = sorted(files)
    if not sources:
        return None
    earlier = folder / f"{MARK}{next_number(folder)}"
    for path in sources:
        target = earlier / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    return earlier
