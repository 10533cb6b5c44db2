"""Contents of checkpoints that tests have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paro.checkpoint.directory import common_of, find_checkpoint, latest_iteration


def read_common(directory_root: str | Path, iteration: int | None = None) -> dict[str, Any] | None:
    """Return the contents of common.json; None if nothing was saved."""
    if iteration is None and latest_iteration(directory_root) is None:
        return None
    return common_of(find_checkpoint(directory_root, iteration))
