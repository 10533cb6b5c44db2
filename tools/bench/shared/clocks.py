"""SM clock, power and temperature of a GPU while it is measured, as nvidia-smi records them."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

CLOCKS = "clocks.csv"
Span = tuple[float, float]  # of time: begin and end in seconds since 1970
_ASK = (
    "nvidia-smi --query-gpu=timestamp,clocks.sm,power.draw,temperature.gpu "
    "--format=csv,noheader,nounits -lms 250 -i"
)
_STAND_IN = "while sleep 0.02; do date '+%Y/%m/%d %H:%M:%S.%3N, 1000, 100.0, 40'; done"


class Sample(NamedTuple):
    """The state of a GPU at a time, in seconds since 1970."""

    time: float
    mhz: float
    watts: float
    degrees: float


@contextmanager
def recorded(file: Path, *, rehearse: bool = False) -> Iterator[Path]:
    """Record a line in the file every 250 ms during the block; none without nvidia-smi."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    argv = ["sh", "-c", _STAND_IN if rehearse else f"exec {_ASK} {gpu}"]
    with (
        file.open("ab") as stream,
        subprocess.Popen(argv, stdout=stream, stderr=subprocess.DEVNULL) as process,
    ):
        try:
            yield file
        finally:
            process.kill()


@contextmanager
def clocks_of(device: torch.device, file: Path | None) -> Iterator[Path | None]:
    """Yield the given file, which another process records, or record one during the block."""
    if file is not None or device.type != "cuda":
        yield file
        return
    with TemporaryDirectory() as folder, recorded(Path(folder) / CLOCKS) as made:
        yield made


def samples_in(file: Path, spans: Sequence[Span]) -> list[Sample]:
    """Return the whole lines of the file within spans."""
    samples = []
    for line in file.read_text().splitlines(keepends=True):
        with suppress(ValueError):  # a driver may answer [N/A], and be about to end the line
            at, *figures = line[: line.index("\n")].split(", ")
            clock, watts, degrees = map(float, figures)
            time = datetime.strptime(at, "%Y/%m/%d %H:%M:%S.%f").timestamp()
            samples.append(Sample(time, clock, watts, degrees))
    return [each for each in samples if any(begin <= each.time <= end for begin, end in spans)]


def clock_of(file: Path, spans: Sequence[Span]) -> dict[str, float | None]:
    """Return the mean SM clock in MHz and power in W over spans; None without a sample in them.

    Empty where nothing was recorded.
    """
    if not file.stat().st_size:
        return {}
    samples = samples_in(file, spans)
    return {
        "sm_clock_mhz": fmean(sample.mhz for sample in samples) if samples else None,
        "watts": fmean(sample.watts for sample in samples) if samples else None,
    }


def clock_text(figures: Mapping[str, Any]) -> str:
    """Format what `clock_of` found, to be added to a line."""
    if "watts" not in figures:
        return ""
    if figures["watts"] is None:
        return ", SM clock and power not sampled"
    return f", SM clock {figures['sm_clock_mhz']:.0f} MHz, {figures['watts']:.0f} W"


def working_clock(file: Path, begin: float) -> str:
    """Average the samples since a time in which the GPU takes half its power or more."""
    samples = samples_in(file, [(begin, math.inf)])
    if not samples:
        return "SM clock and power were not recorded"
    most = max(sample.watts for sample in samples)
    working = [sample for sample in samples if sample.watts >= most / 2]
    _, clock, watts, degrees = map(fmean, zip(*working, strict=True))
    share = f"{len(working)} of {len(samples)} samples, those of half the power or more"
    return f"SM clock {clock:.0f} MHz, {watts:.0f} W, {degrees:.0f} C: means of {share}"
