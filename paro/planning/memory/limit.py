"""The memory limit of a rank: one usable share for planner, dry run and trainer."""

# The limit applies to a MemorySnapshot's total (gathering.py), which counts the model, its states
# and its activations, and which the trainer logs next to the measured peak.

from __future__ import annotations

from dataclasses import dataclass

USABLE = 0.9  # of a device: CUDA's context, communication buffers and fragmentation take the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """A device's memory, and the usable part of it."""

    device_bytes: int
    usable_bytes: int

    def describe(self) -> str:
        usable, device = self.usable_bytes / 1e9, self.device_bytes / 1e9
        return f"{usable:.1f} GB that can be used of {device:g} GB"


def memory_limit(device_bytes: int, *, reserved_bytes: int = 0) -> MemoryLimit:
    """The limit of a device: the usable share, or less if `reserved_bytes` leaves less."""
    share = round(USABLE * device_bytes)
    return MemoryLimit(
        device_bytes=device_bytes, usable_bytes=min(share, device_bytes - reserved_bytes)
    )
