"""Cuts a model into units, hooks them into forward and backward, and prefetches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingConfig:
    """How the model states are spread (the flags `--paro-*`)."""

    strategy: str  # as typed: letters, degrees or a name; parsed against the world by config.py
    group_size: int
    collective: str = "native"
    prefetch_units: int = 1

    def __post_init__(self) -> None:
        if self.prefetch_units < 0:
            raise ValueError(f"--paro-prefetch-units {self.prefetch_units} is negative; 0 is off")
