"""Initializes and shuts down torch.distributed, selects the device, seeds generators."""

from __future__ import annotations

import errno
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
from paro.distributed.world import World
from paro.errors import UserError, describe, writing

_MOST_MINUTES = 365 * 24 * 60


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """Backend, timeout and flight recorder of torch.distributed."""

    distributed_backend: str = "nccl"  # or "gloo": CPU ranks
    distributed_timeout_minutes: int = 10
    flight_recorder_dir: str | None = None

    @property
    def timeout(self) -> timedelta:
        """The timeout of a collective."""
        return timedelta(minutes=self.distributed_timeout_minutes)

    def __post_init__(self) -> None:
        minutes = self.distributed_timeout_minutes
        if not 0 < minutes <= _MOST_MINUTES:
            raise UserError(
                f"--distributed-timeout-minutes {minutes} must be positive and at most "
                f"{_MOST_MINUTES}, a year"
            )


def device_for(config: RuntimeConfig, world: World) -> torch.device:
    """The GPU of this local rank for nccl, the CPU for gloo; `UserError` without the GPU."""
    if config.distributed_backend == "gloo":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(
            "--distributed-backend nccl needs CUDA devices and torch sees none; "
            "give --distributed-backend gloo to run on CPU ranks"
        )
    if world.local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local rank {world.local_rank} has no GPU: torch sees {torch.cuda.device_count()}; "
            "start one process per GPU, and under SLURM give GPUs to the node (--gpus-per-node) "
            "instead of one to each task, so that ranks see each other's"
        )
    return torch.device("cuda", world.local_rank)


def _store_of_this_attempt(world: World, timeout: timedelta) -> dist.Store | None:
    """The store of this attempt under torchrun with its agent store; None: torch's default."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
    return fresh_store(store, rank=world.rank, world_size=world.size, timeout=timeout)


@contextmanager
def _meeting(world: World, timeout: timedelta) -> Iterator[None]:
    """Around the rendezvous: one that does not complete is one line, with status 1."""
    try:
        yield
    except (TimeoutError, dist.DistStoreError, dist.DistNetworkError) as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise TimeoutError(
            errno.ETIMEDOUT,
            f"rank {world.rank} of {world.size} did not meet the others at {place} within "
            f"--distributed-timeout-minutes {timeout.total_seconds() / 60:.0f}: {describe(error)}",
        ) from error


@contextmanager
def distributed(config: RuntimeConfig, world: World) -> Iterator[Control]:
    """Initializes torch.distributed for the block, unless the world is a single process."""
    device = device_for(config, world)
    if config.flight_recorder_dir is not None:
        with writing(f"--flight-recorder-dir {config.flight_recorder_dir}"):
            record_flights(config.flight_recorder_dir)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world.size > 1:
        with _meeting(world, config.timeout):
            dist.init_process_group(
                config.distributed_backend,
                store=_store_of_this_attempt(world, config.timeout),
                rank=world.rank,
                world_size=world.size,
                timeout=config.timeout,
                device_id=device if device.type == "cuda" else None,
            )
    control = Control(world, device)
    yield control
    # Not after an exception: with a dead peer this would hang. A gloo group is not destroyed: its
    # destructor holds the GIL and sometimes deadlocks with one of its own threads, which needs the
    # GIL to free its last tensor (torch 2.13).
    if world.size > 1:
        control.barrier()
        if device.type == "cuda":
            dist.destroy_process_group()


def seed_everything(seed: int) -> None:
    """Seeds the global generators, for libraries; model and data have separate generators."""
    random.seed(seed)
    torch.manual_seed(seed)
