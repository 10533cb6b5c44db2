"""Finishes gradients, clips, updates the shards and publishes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """AdamW and clipping, under Megatron's names and defaults."""

    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    adam_implementation: str = "torch"  # or "apex"

    def __post_init__(self) -> None:
        for flag, beta in (("--adam-beta1", self.adam_beta1), ("--adam-beta2", self.adam_beta2)):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"{flag} {beta} must lie in [0, 1)")
        if self.adam_eps <= 0.0:
            raise ValueError(f"--adam-eps {self.adam_eps} must be positive")
        if self.clip_grad < 0.0:
            raise ValueError(f"--clip-grad {self.clip_grad} is negative; 0 turns clipping off")
