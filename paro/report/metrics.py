"""The metrics file: one JSON object per logged iteration, flushed as it is written."""

# A run that resumes from iteration k appends to the file of the run before it. Lines after k are
# then of a future that will be written again, so they leave the file, as does a last line that a
# crash cut short: no iteration appears twice. What leaves is kept in FILE.previous, so that a fresh
# run that is given an old file (k = 0) destroys nothing either.

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import IO

from paro.report.record import Metrics


class MetricsFile:
    """Appends lines; opened by the first rank alone. Full float precision, no number as null."""

    def __init__(self, path: str, *, start_iteration: int) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            _drop_lines_after(self._path, start_iteration)
        self._stream: IO[str] = self._path.open("a", encoding="utf-8")

    def write(self, metrics: Metrics) -> None:
        """Add one line and hand it to the operating system at once."""
        values = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(metrics).items()
        }
        self._stream.write(json.dumps(values, allow_nan=False) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def _drop_lines_after(path: Path, iteration: int) -> None:
    """Rewrite the file without what lies after `iteration`, if there is any such line."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    whole = lines if text.endswith("\n") else lines[:-1]
    kept = [line for line in whole if _iteration_of(line, path) <= iteration]
    if len(kept) == len(lines):
        return
    beside = path.with_name(f"{path.name}.tmp.{os.getpid()}")
    beside.write_text("".join(kept), encoding="utf-8")
    path.replace(path.with_name(f"{path.name}.previous"))
    beside.replace(path)


def _iteration_of(line: str, path: Path) -> int:
    try:
        return int(json.loads(line)["iteration"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--metrics-file {path} exists and is no metrics file: give another name"
        ) from error
