"""Sums, object gathers, barriers and error agreement among all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from paro.distributed.world import World
from paro.errors import PeerError, for_all_ranks


class Control:
    """Small collectives over all ranks; only the training thread may call them.

    They use the default process group and are not counted as traffic.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        self.world = world
        self.device = device

    def sum(self, values: list[float]) -> list[float]:
        """Each value summed over the ranks, in fp64; every rank gets the same bits."""
        if self.world.size == 1:
            return values
        on_device = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(on_device)
        return [float(value) for value in on_device.tolist()]

    def barrier(self) -> None:
        if self.world.size > 1:
            self.sum([0.0])

    def gather(self, value: object) -> list[Any]:
        """Every rank's `value`, in rank order; for small objects at the start of a run."""
        if self.world.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world.size
        dist.all_gather_object(gathered, value)
        return gathered

    @contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """Raises an error on all ranks if the block fails on any rank: that of the lowest one.

        A bug is raised unchanged where it happened, and as a `PeerError` on the other ranks.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        told = None if failure is None else for_all_ranks(failure, self.world.rank)
        first = next((error for error in self.gather(told) if error is not None), None)
        if failure is not None and isinstance(told, PeerError):
            raise failure
        if first is not None:
            raise first


class PlannedControl(Control):
    """For a dry run, which starts no other ranks: every rank is assumed to pass the same value."""

    def sum(self, values: list[float]) -> list[float]:
        return [value * self.world.size for value in values]

    def gather(self, value: object) -> list[Any]:
        return [value] * self.world.size
