"""Records the SM clock, the power and the temperature of the GPU while parts run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean

CLOCKS = "clocks.csv"
_ASK = (
    "nvidia-smi --query-gpu=timestamp,clocks.sm,power.draw,temperature.gpu "
    "--format=csv,noheader,nounits -lms 250 -i"
)
_STAND_IN = "import time\nwhile True: print('now, 1000, 100.0, 40', flush=True); time.sleep(0.25)"


@contextmanager
def recorded(file: Path, *, rehearse: bool) -> Iterator[None]:
    """While entered, a process adds a line to the file every 250 ms; none without nvidia-smi."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    argv = [sys.executable, "-c", _STAND_IN] if rehearse else [*_ASK.split(), gpu]
    process = None
    with file.open("ab") as stream, suppress(OSError):
        process = subprocess.Popen(argv, stdout=stream, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def clocks_after(place: int, file: Path) -> str:
    """Means of what the file has after this byte, where the GPU works: takes half its power."""
    found: list[list[float]] = []
    for line in file.read_text()[place:].splitlines(keepends=True):
        with suppress(ValueError):  # a driver may answer [N/A], and be about to end the line
            found.append([*map(float, line[: line.index("\n")].split(",")[1:])])
    if not found:
        return "SM clock and power were not recorded"
    most = max(watts for _, watts, _ in found)
    working = [values for values in found if values[1] >= most / 2]
    clock, watts, degrees = map(fmean, zip(*working, strict=True))
    share = f"{len(working)} of {len(found)} samples, those of half the power or more"
    return f"SM clock {clock:.0f} MHz, {watts:.0f} W, {degrees:.0f} C: means of {share}"
