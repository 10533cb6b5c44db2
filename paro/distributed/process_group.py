"""Starts and stops torch.distributed, picks the device, seeds."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from paro.distributed.control import Control
from paro.distributed.flight_recorder import record_flights
from paro.distributed.rendezvous import fresh_store
from paro.distributed.user_errors import user_mistakes
from paro.distributed.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """How ranks talk to each other."""

    distributed_backend: str = "nccl"  # or "gloo": CPU ranks
    distributed_timeout_minutes: int = 10
    flight_recorder_dir: str | None = None

    def __post_init__(self) -> None:
        if self.distributed_timeout_minutes <= 0:
            raise ValueError(
                f"--distributed-timeout-minutes {self.distributed_timeout_minutes} must be positive"
            )


def device_for(config: RuntimeConfig, world: World) -> torch.device:
    """A GPU per local rank under nccl, the CPU under gloo."""
    if config.distributed_backend == "gloo":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            "--distributed-backend nccl needs CUDA devices and torch sees none; "
            "give --distributed-backend gloo to run on CPU ranks"
        )
    if world.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {world.local_rank} has no GPU: torch sees {torch.cuda.device_count()}; "
            "start one process per GPU, and under SLURM give GPUs to the node (--gpus-per-node) "
            "instead of one to each task, so that ranks see each other's"
        )
    return torch.device("cuda", world.local_rank)


def _store_of_this_attempt(world: World, timeout: timedelta) -> dist.Store | None:
    """Where the ranks of a torchrun that restarts find each other; else None: torch's own way."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
    return fresh_store(store, rank=world.rank, world_size=world.size, timeout=timeout)


@contextmanager
def distributed(config: RuntimeConfig, world: World) -> Iterator[Control]:
    """The process group of a run, for as long as the block lasts; none for one process."""
    with user_mistakes():
        device = device_for(config, world)
        if config.flight_recorder_dir is not None:
            record_flights(config.flight_recorder_dir)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world.size > 1:
        dist.init_process_group(
            config.distributed_backend,
            store=_store_of_this_attempt(world, timeout_of(config)),
            rank=world.rank,
            world_size=world.size,
            timeout=timeout_of(config),
            device_id=device if device.type == "cuda" else None,
        )
    control = Control(world, device)
    yield control
    # Only after a run that ended well: with a dead peer this would hang. A gloo group is left to
    # the end of the process: its destructor, which holds Python's lock, now and then waits for ever
    # for a thread of its own that wants the lock to drop its last tensor (torch 2.13).
    if world.size > 1:
        control.barrier()
        if device.type == "cuda":
            dist.destroy_process_group()


def timeout_of(config: RuntimeConfig) -> timedelta:
    """After how long a collective gives up on a peer."""
    return timedelta(minutes=config.distributed_timeout_minutes)


def seed_everything(seed: int) -> None:
    """Seeds what libraries may draw from; model and data have generators of their own."""
    random.seed(seed)
    torch.manual_seed(seed)
