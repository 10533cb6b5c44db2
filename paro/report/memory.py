"""Memory as measured: what the CUDA allocator handed out, or how large a CPU process has been."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

import torch

_MIB = 2**20


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this rank has used so far: allocated on CUDA, resident on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def allocator_bytes(device: torch.device) -> dict[str, int]:
    """What Megatron shows of CUDA's allocator beside the peak; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    return {
        "reserved-bytes": stats["reserved_bytes.all.current"],
        "allocated-bytes": stats["allocated_bytes.all.current"],
        "allocated-count": stats["allocation.all.current"],
    }


def resident_bytes(device: torch.device) -> int:
    """What this process takes already: nothing on a GPU, interpreter and libraries on CPU."""
    return 0 if device.type == "cuda" else peak_memory_bytes(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryForecast:
    """What a run should need on top of what the process had before its model was built."""

    predicted_bytes: int  # the largest live set of a step, by formula
    states_bytes: int  # of which stays throughout
    bytes_before: int  # interpreter and libraries, where they count as this rank's memory


def memory_line(
    device: torch.device, *, rank: int, iteration: int, forecast: MemoryForecast
) -> str:
    """Megatron's memory line, followed by what was predicted for the same figure."""
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
