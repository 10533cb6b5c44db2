"""The metrics file: one JSON object per logged iteration, flushed as it is written."""

# A run that resumes from iteration k appends to the existing file. Lines after k will be written
# again, so they are removed first, as is a last line that a crash cut short: no iteration appears
# twice. The old content is kept in FILE.previous, so that a fresh run (k = 0) with an existing file
# destroys nothing either.

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TypedDict

from data.atomic_file import replacing
from paro.errors import UserError, writing
from paro.report.record import Metrics
from paro.untrusted.regular_file import read_bytes
from paro.untrusted.schema import parse_json

_BEGINNING = '{"iteration": '
_MAX_BYTES = 2**32


class _Line(TypedDict):
    iteration: float


class MetricsFile:
    """Appends lines, on the first rank only. Floats in full precision; NaN is written as null."""

    def __init__(self, path: str, *, start_iteration: int) -> None:
        place = Path(path)
        with writing(f"--metrics-file {path}"):
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.exists():
                _drop_lines_after(place, start_iteration)
            self._stream = place.open("a", encoding="utf-8")

    def write(self, metrics: Metrics) -> None:
        """Appends one line and flushes it."""
        values = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(metrics).items()
        }
        self._stream.write(json.dumps(values, allow_nan=False) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def _drop_lines_after(path: Path, iteration: int) -> None:
    """Rewrites the file without the lines after `iteration`, if there are any."""
    content = read_bytes(path, f"--metrics-file {path}", max_bytes=_MAX_BYTES)
    lines = content.splitlines(keepends=True)
    kept = [line for line in lines if _iteration_of(line, path) <= iteration]
    if len(kept) == len(lines):
        return
    with replacing(path) as temporary:
        temporary.write_bytes(b"".join(kept))
        path.replace(path.with_name(f"{path.name}.previous"))


def _iteration_of(line: bytes, path: Path) -> float:
    """The iteration of a line; infinity for a line that a crash cut short."""
    try:
        if not line.endswith(b"\n") and line[: len(_BEGINNING)] == _BEGINNING[: len(line)].encode():
            return math.inf
        found: _Line = parse_json(line, _Line, "")
        return found["iteration"]
    except UserError as error:
        raise UserError(
            f"--metrics-file {path} exists and is no metrics file: give another name"
        ) from error
