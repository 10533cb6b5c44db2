"""Memory as measured: what the CUDA allocator handed out, or how large a CPU process has been."""

from __future__ import annotations

import resource
import sys

import torch

_MIB = 2**20


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this rank has used so far: allocated on CUDA, resident on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def memory_line(
    device: torch.device, *, rank: int, iteration: int, predicted_bytes: int, state_bytes: int
) -> str:
    """Megatron's memory line, followed by the model states as predicted and as they are."""
    states = (
        f"model states: {state_bytes / _MIB:.1f} | "
        f"model states predicted: {predicted_bytes / _MIB:.1f}"
    )
    head = f"[Rank {rank}] (after {iteration} iterations) memory (MB)"
    if device.type != "cuda":
        return f"{head} | max resident: {peak_memory_bytes(device) / _MIB:.1f} | {states}"
    return (
        f"{head} | allocated: {torch.cuda.memory_allocated(device) / _MIB:.1f}"
        f" | max allocated: {torch.cuda.max_memory_allocated(device) / _MIB:.1f}"
        f" | reserved: {torch.cuda.memory_reserved(device) / _MIB:.1f}"
        f" | max reserved: {torch.cuda.max_memory_reserved(device) / _MIB:.1f} | {states}"
    )
