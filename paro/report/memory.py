"""Measured memory: allocations of the CUDA allocator, or resident size of a CPU process."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

import torch

_MIB = 2**20


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this rank so far, in bytes: allocated on CUDA, resident on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def allocator_bytes(device: torch.device) -> dict[str, int]:
    """The allocator statistics that Megatron shows in addition to the peak; empty on a CPU."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    return {
        "reserved-bytes": stats["reserved_bytes.all.current"],
        "allocated-bytes": stats["allocated_bytes.all.current"],
        "allocated-count": stats["allocation.all.current"],
    }


def resident_bytes(device: torch.device) -> int:
    """Memory this process already uses: 0 on a GPU; on a CPU, interpreter and libraries."""
    return 0 if device.type == "cuda" else peak_memory_bytes(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryForecast:
    """Predicted memory of a run, on top of the process's memory before the model was built."""

    predicted_bytes: int  # peak of a step, by formula
    states_bytes: int  # the part that is allocated throughout the step
    bytes_before: int  # interpreter and libraries, if they count as this rank's memory


def memory_line(
    device: torch.device, *, rank: int, iteration: int, forecast: MemoryForecast
) -> str:
    """Megatron's memory line, followed by the prediction for the same figure."""
    predicted = (
        f"model states: {forecast.states_bytes / _MIB:.1f} | "
        f"predicted peak: {(forecast.bytes_before + forecast.predicted_bytes) / _MIB:.1f}"
    )
    head = f"[Rank {rank}] (after {iteration} iterations) memory (MB)"
    if device.type != "cuda":
        return (
            f"{head} | max resident: {peak_memory_bytes(device) / _MIB:.1f}"
            f" | before the model was built: {forecast.bytes_before / _MIB:.1f} | {predicted}"
        )
    return (
        f"{head} | allocated: {torch.cuda.memory_allocated(device) / _MIB:.1f}"
        f" | max allocated: {torch.cuda.max_memory_allocated(device) / _MIB:.1f}"
        f" | reserved: {torch.cuda.memory_reserved(device) / _MIB:.1f}"
        f" | max reserved: {torch.cuda.max_memory_reserved(device) / _MIB:.1f} | {predicted}"
    )
