"""Contents of checkpoints that tests have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paro.checkpoint.directory import common_of, find_checkpoint


def read_common(directory_root: str | Path, iteration: int | None = None) -> dict[str, Any] | None:
    """Return the contents of common.json; None if nothing was saved."""
    directory = find_checkpoint(directory_root, iteration)
    return common_of(directory) if directory else None
