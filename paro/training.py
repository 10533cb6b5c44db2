"""The training step and the loop around it; TrainState is the only thing that changes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How long to train, on what batches, when to evaluate and when to leave."""

    micro_batch_size: int
    train_iters: int  # derived from train_samples where those are given
    eval_iters: int = 100
    eval_interval: int | None = 1000
    calculate_per_token_loss: bool = False
    exit_interval: int | None = None
    exit_duration_in_mins: float | None = None
    exit_signal_handler: bool = False
    exit_signal: str = "SIGTERM"
    manual_gc: bool = False
    manual_gc_interval: int = 0
    seed: int = 1234
