"""Initializes and shuts down torch.distributed, selects the device, seeds generators."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from paro.distributed.control import Control
from paro.distributed.flight_recorder import record_flights
from paro.distributed.gpu import check_gpu
from paro.distributed.groups import GroupConfig
from paro.distributed.host_memory import keep_freed_memory
from paro.distributed.interface import choose_interface, interface_text
from paro.distributed.rendezvous import open_store, refusals_are_shared, rendezvous
from paro.distributed.world import World
from paro.errors import RunError, UserError, writing

_MAX_MINUTES = 365 * 24 * 60


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """Backend, timeout and flight recorder of torch.distributed."""

    distributed_backend: str = "nccl"  # or "gloo": CPU ranks
    distributed_timeout_minutes: int = 10
    paro_nccl_launch_order: str = "free"  # or "implicit": see groups.py
    flight_recorder_dir: str | None = None

    @property
    def timeout(self) -> timedelta:
        """The timeout of a collective."""
        return timedelta(minutes=self.distributed_timeout_minutes)

    def groups_on(self, device: torch.device) -> GroupConfig:
        """How process groups of model states are made on a rank's device."""
        return GroupConfig(
            timeout=self.timeout,
            backend=self.distributed_backend,
            device=device,
            launch_order=self.paro_nccl_launch_order,
        )

    def __post_init__(self) -> None:
        minutes = self.distributed_timeout_minutes
        if not 0 < minutes <= _MAX_MINUTES:
            raise UserError(
                f"--distributed-timeout-minutes {minutes} must be positive and at most "
                f"{_MAX_MINUTES}, a year"
            )


def device_for(config: RuntimeConfig, world: World) -> torch.device:
    """The GPU of this local rank for nccl, the CPU for gloo; `UserError` without the GPU."""
    if config.distributed_backend == "gloo":
        return torch.device("cpu")
    return check_gpu(world.local_rank)


@contextmanager
def distributed(
    config: RuntimeConfig, world: World, settings: Mapping[str, str] | None = None
) -> Iterator[Control]:
    """Initializes torch.distributed for the block, unless the world is a single process.

    `UserError` on all ranks if `settings` are not the same on all, or where one has no device.
    """
    with refusals_are_shared():
        device = device_for(config, world)
        if config.flight_recorder_dir is not None:
            with writing(f"--flight-recorder-dir {config.flight_recorder_dir}"):
                record_flights(config.flight_recorder_dir, world.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    if world.size > 1:
        _connect(config, world, settings or {})
    control = Control(world, device)
    yield control
    # Not after an exception: with a dead peer this would hang. A gloo group is not destroyed: its
    # destructor holds the GIL and sometimes deadlocks with one of its own threads, which needs the
    # GIL to free its last tensor (torch 2.13).
    try:
        control.barrier()
    except RuntimeError as error:
        raise RuntimeError(f"at the end, while waiting for the others: {error}") from error


def _connect(config: RuntimeConfig, world: World, settings: Mapping[str, str]) -> None:
    """Makes the default group of all ranks, once they agree; `RunError` if some do not connect."""
    store = rendezvous(open_store(world, config.timeout), world, config.timeout, settings)
    choose_interface(store, world)
    try:
        dist.init_process_group(
            "gloo",
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=config.timeout,
        )
    except RuntimeError as error:  # a DistError is one
        what = str(error).partition("\n")[0]
        raise RunError(f"ranks do not reach each other ({what}): {interface_text()}") from error


def seed_everything(seed: int) -> None:
    """Seeds the global generators, for libraries; model and data have separate generators."""
    random.seed(seed)
    torch.manual_seed(seed)
