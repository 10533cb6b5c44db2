"""Measures memory: bytes that a rank has allocated, and bytes that host and device have left."""

from __future__ import annotations

import gc
import re
import resource
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

_MIB = 2**20


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this rank so far, in bytes: allocated on CUDA, resident on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_reserved_bytes(device: torch.device) -> int | None:
    """Return the peak bytes that the CUDA allocator has reserved so far; None on a CPU.

    Reserved minus allocated bytes are cached for reuse, or fragmented.
    """
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


def allocator_bytes(device: torch.device) -> dict[str, int]:
    """Return the CUDA allocator's statistics that Megatron shows; empty on a CPU."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    return {
        "reserved-bytes": stats["reserved_bytes.all.current"],
        "allocated-bytes": stats["allocated_bytes.all.current"],
        "allocated-count": stats["allocation.all.current"],
    }


def resident_bytes(device: torch.device) -> int:
    """Return the bytes that interpreter and libraries use, on a CPU; 0 on a GPU."""
    return 0 if device.type == "cuda" else peak_memory_bytes(device)


def anonymous_bytes() -> int:
    """Return the resident bytes of this process that no file or other process shares."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


def give_back_freed_memory() -> None:
    """Return freed memory to the system; otherwise Python and glibc keep it."""
    gc.collect()
    if hasattr(psutil, "heap_trim"):  # not with every C library
        psutil.heap_trim()


def available_host_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that processes of this host or container can still allocate.

    The minimum of the system's available memory and the rest in each cgroup (v2) of this process.
    """
    return min([psutil.virtual_memory().available, *_left_in_cgroups(root)])


def _left_in_cgroups(root: Path) -> list[int]:
    """Return the bytes left under the limit of this process's cgroup, and of each parent cgroup."""
    cgroup = re.search(r"^0::/(.*)$", _text(root / "proc/self/cgroup"), re.MULTILINE)
    if cgroup is None:
        return []
    mount, left = root / "sys/fs/cgroup", []
    folder = mount / cgroup[1]
    for group in (folder, *folder.parents):
        limit, used = (_text(group / f"memory.{name}").strip() for name in ("max", "current"))
        if limit.isdigit() and used.isdigit():
            stat = dict(line.split() for line in _text(group / "memory.stat").splitlines())
            reclaimable = sum(int(stat.get(f"{kind}_file", 0)) for kind in ("active", "inactive"))
            left.append(max(0, int(limit) - int(used) + reclaimable))
        if group == mount:
            break
    return left


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryForecast:
    """Predicted memory of a rank, and the process's memory before the model was built."""

    predicted_bytes: int  # predicted peak of allocated bytes in a step
    reserved_bytes: int  # predicted peak with fragmentation: bytes that the CUDA allocator reserves
    states_bytes: int  # predicted bytes of model states, allocated throughout the step
    bytes_before: int  # bytes of interpreter and libraries, if measured memory includes them


def memory_line(device: torch.device, *, iteration: int, forecast: MemoryForecast) -> str:
    """Format Megatron's memory line, of the first rank, followed by the predicted figures."""
    predicted = {
        "model states": forecast.states_bytes,
        "predicted peak": forecast.bytes_before + forecast.predicted_bytes,
    }
    measured = {
        "max resident": peak_memory_bytes(device),
        "before the model was built": forecast.bytes_before,
    }
    if device.type == "cuda":
        measured = {
            "allocated": torch.cuda.memory_allocated(device),
            "max allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "max reserved": torch.cuda.max_memory_reserved(device),
        }
        predicted["predicted reserved"] = forecast.reserved_bytes
    sizes = (f"{name}: {size / _MIB:.1f}" for name, size in (measured | predicted).items())
    return f"[Rank 0] (after {iteration} iterations) memory (MB) | {' | '.join(sizes)}"
