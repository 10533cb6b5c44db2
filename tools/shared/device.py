"""The device of a tool's --device flag, if this machine has it, and what it can compute."""

from __future__ import annotations

import re

import torch

from paro.distributed.control import Control
from paro.distributed.world import World
from paro.errors import UserError, count_text
from paro.report.flops import find_peak


def device_of(name: str | None) -> torch.device:
    """Return the CPU or a GPU by torch's name for it; None: the first GPU, else the CPU."""
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None:
        return torch.device("cuda", 0) if there else torch.device("cpu")
    if name == "cpu":
        return torch.device(name)
    match = re.fullmatch(r"cuda(?::(\d{1,4}))?", name)
    if match is None:
        raise UserError(f"--device {name} is unknown: give cpu, cuda or cuda:1")
    number = int(match[1] or 0)
    if number >= there:
        sees = count_text(there, "CUDA device") if there else "no CUDA device"
        raise UserError(f"--device {name}: torch sees {sees} here")
    return torch.device("cuda", number)


def peak_flops(device: torch.device, compute: str, peak_tflops: float | None) -> float | None:
    """Return FLOP/s of a GPU in a type, or --peak-tflops; None for a CPU without it."""
    if device.type != "cuda" and peak_tflops is None:
        return None
    control = Control(World(), device)
    peak = find_peak(device, compute=compute, peak_tflops=peak_tflops, control=control)
    return peak.flops_per_second
