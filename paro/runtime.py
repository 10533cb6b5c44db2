"""Starts and stops torch.distributed, picks the device, seeds; the only reader of the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process among all; read from torchrun's or SLURM's environment, or one process alone."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    ranks_per_node: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """How ranks talk to each other."""

    distributed_backend: str = "nccl"  # or "gloo": CPU ranks
    distributed_timeout_minutes: int = 10


def read_world() -> World:
    """The world that the launcher describes in the environment: torchrun's names, then SLURM's."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if "RANK" not in os.environ and "SLURM_PROCID" in os.environ:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
    rank, size, local_rank, local_size = (os.environ.get(name) for name in names)
    if rank is None or size is None:
        return World()
    return World(
        rank=int(rank),
        size=int(size),
        local_rank=int(local_rank or 0),
        ranks_per_node=int(local_size or size),
    )


def timeout_of(config: RuntimeConfig) -> timedelta:
    """After how long a collective gives up on a peer."""
    return timedelta(minutes=config.distributed_timeout_minutes)
