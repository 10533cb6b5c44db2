"""Where a run is saved and what it starts from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Megatron's checkpoint flags."""

    save: str | None = None
    save_interval: int | None = None
    load: str | None = None
    exit_on_missing_checkpoint: bool = False
