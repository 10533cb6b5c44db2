"""The metrics file: one JSON object per logged iteration, flushed as it is written."""

# A run that resumes from iteration k appends to the existing file. Lines after k will be written
# again, so they are removed first, as is a last line that a crash cut short: no iteration appears
# twice. Lines after k are kept in FILE.earlier_N with a copy of the run's record, as are all lines
# of an earlier run where a fresh one begins (k = 0).

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from data.atomic_file import replacing
from paro.errors import UserError, about, writing
from paro.report.config import run_record_path
from paro.report.earlier import earlier_file
from paro.untrusted.regular_file import read_bytes
from paro.untrusted.schema import parse_json

if TYPE_CHECKING:  # importing this loads torch, which readers of the file do not need
    from paro.report.record import Metrics

_BEGINNING = b'{"iteration": '
_MAX_BYTES = 2**32


class _Line(TypedDict):
    iteration: float


class MetricsFile:
    """JSON lines of metrics, appended by the first rank; NaN is written as null.

    `say` gets a line about lines of an existing file that move to another file, and its name.
    """

    def __init__(self, path: str, *, start_iteration: int, say: Callable[[str], None]) -> None:
        file = Path(path)
        with writing(f"--metrics-file {path}"):
            file.parent.mkdir(parents=True, exist_ok=True)
            _keep_up_to(file, start_iteration, say)
            self._stream = file.open("a", encoding="utf-8")

    def write(self, metrics: Metrics) -> None:
        """Append one line and flush it."""
        values = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(metrics).items()
        }
        self._stream.write(json.dumps(values, allow_nan=False) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def read_lines(path: Path, what: str, say: Callable[[str], None]) -> list[bytes]:
    """Read the complete lines of a metrics file, unchecked; `say` gets a line about a partial line.

    The last line is partial if its run was killed, or is writing the line right now.
    """
    *lines, rest = read_bytes(path, what, max_bytes=_MAX_BYTES).split(b"\n")
    if not rest:
        return lines
    if lines or rest.startswith(_BEGINNING[: len(rest)]):  # otherwise not a metrics file
        try:
            parse_json(rest, _Line, "")
        except UserError:
            say(f"{what}: the last line is cut short, as a killed run leaves it: it is left out")
            return lines
    return [*lines, rest]


def _keep_up_to(path: Path, iteration: int, say: Callable[[str], None]) -> None:
    """Move the lines after `iteration`, with a copy of the record, into files of their own."""
    flag = f"--metrics-file {path}"
    lines = read_lines(path, flag, say) if path.exists() else []
    with about(suffix=": the file exists and is no metrics file; give another name"):
        iterations = [
            parse_json(line, _Line, f"{flag}, line {number}")["iteration"]
            for number, line in enumerate(lines, start=1)
        ]
    lines_before = [line for line, at in zip(lines, iterations, strict=True) if at <= iteration]
    removed = [line for line, at in zip(lines, iterations, strict=True) if at > iteration]
    record = run_record_path(path)
    if removed or (iteration == 0 and record.exists()):
        earlier = earlier_file(path)
        if record.exists():
            shutil.copyfile(record, run_record_path(earlier))
        if removed:
            _write(earlier, removed)
        copy = earlier if removed else run_record_path(earlier)
        after = f" after iteration {iteration}" if iteration else ""
        say(f"{flag}: what an earlier start wrote{after} is in {copy} now")
    if lines and sum(len(line) + 1 for line in lines_before) != path.stat().st_size:
        _write(path, lines_before)


def _write(path: Path, lines: Sequence[bytes]) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(b"".join(line + b"\n" for line in lines))
