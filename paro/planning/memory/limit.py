"""How much of a device's memory a rank may fill: one share for planner, dry run and trainer."""

# What is held against it is a Moment's total (working_memory.py), which counts what the model, its
# states and its activations take, and which the trainer's log shows beside the measured peak.

from __future__ import annotations

from dataclasses import dataclass

USABLE = 0.9  # of a device: CUDA's context, communication buffers and fragmentation take the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """A device's memory, and what can be used of it."""

    device_bytes: int
    usable_bytes: int

    def describe(self) -> str:
        usable, device = self.usable_bytes / 1e9, self.device_bytes / 1e9
        return f"{usable:.1f} GB that can be used of {device:g} GB"


def memory_limit(
    device_bytes: int, *, reserved_bytes: int = 0, usable: float = USABLE
) -> MemoryLimit:
    """The limit of a device; `reserved_bytes` is known to be taken, and may be more than usual."""
    share = round(usable * device_bytes)
    return MemoryLimit(
        device_bytes=device_bytes, usable_bytes=min(share, device_bytes - reserved_bytes)
    )
