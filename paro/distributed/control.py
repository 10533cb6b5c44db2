"""Sums, object gathers, barriers and error agreement among all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from paro.distributed.user_errors import UserMistakeError, one_line
from paro.distributed.world import World


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
        """Raises a user's mistake on all ranks if the block fails with one on any rank.

        `ValueError` and `OSError` count as such; all ranks raise the text of the lowest failed one.
        """
        mistake: str | None = None
        try:
            yield
        except (ValueError, OSError) as error:
            mistake = one_line(error)
        first = next((text for text in self.gather(mistake) if text is not None), None)
        if first is not None:
            raise UserMistakeError(first)


class PlannedControl(Control):
    """For a dry run, which starts no other ranks: every rank is assumed to pass the same value."""

    def sum(self, values: list[float]) -> list[float]:
        return [value * self.world.size for value in values]

    def gather(self, value: object) -> list[Any]:
        return [value] * self.world.size
