"""Sums, object gathers, barriers and error agreement among all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paro.distributed.world import World
from paro.errors import PeerError, RunError, UserError, for_all_ranks

# gloo's all-reduce takes 2 (n - 1) passes from neighbour to neighbour. With more ranks than this,
# one rank receives from all instead and broadcasts the sum, which takes log n passes.
_MOST_IN_RING = 64

SharedError = UserError | RunError | PeerError


@dataclass(eq=False)
class Control:
    """Small collectives over all ranks, or the ranks of `group`; only one thread may call them.

    They are not counted as traffic. Their values are on the host, so gloo sends them always.
    """

    world: World
    device: torch.device
    group: dist.ProcessGroup | None = None  # None: the default group, for the training thread
    store: dist.Store | None = None  # the store of all ranks; None: of tests, or of a single rank

    def over(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> Control:
        """Return the collectives over a group of `ranks`, which include this rank."""
        world = World(rank=ranks.index(self.world.rank), size=len(ranks))
        return Control(world, self.device, group=group)

    def sum(self, values: list[float]) -> list[float]:
        """Return each value summed over the ranks, in fp64; every rank gets the same bits."""
        if self.world.size == 1:
            return values
        sums = torch.tensor(values, dtype=torch.float64)
        if self.world.size <= _MOST_IN_RING:
            dist.all_reduce(sums, group=self.group)
        else:  # the first rank receives from all, adds in rank order, and broadcasts
            is_first = self.world.rank == 0
            parts = [torch.empty_like(sums) for _ in range(self.world.size)] if is_first else None
            dist.gather(sums, parts, group=self.group, group_dst=0)
            if parts is not None:
                torch.sum(torch.stack(parts), 0, out=sums)
            dist.broadcast(sums, group=self.group, group_src=0)
        return [float(value) for value in sums.tolist()]

    def gather_numbers(self, values: Sequence[float]) -> list[list[float]]:
        """Return every rank's `values`, in rank order and fp64; all ranks give equally many."""
        everyone = torch.tensor([values] * self.world.size, dtype=torch.float64)
        if self.world.size > 1:
            mine, is_first = everyone[0].clone(), self.world.rank == 0
            dist.gather(mine, [*everyone] if is_first else None, group=self.group, group_dst=0)
            dist.broadcast(everyone, group=self.group, group_src=0)
        numbers: list[list[float]] = everyone.tolist()
        return numbers

    def barrier(self) -> None:
        self.sum([0.0])

    def gather(self, value: object) -> list[Any]:
        """Return every rank's `value`, in rank order; for small objects at the start of a run."""
        if self.world.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world.size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    @contextmanager
    def raise_on_all_ranks(self, blame: str = "", *, name_rank: bool = False) -> Iterator[None]:
        """Raise the error of the lowest failing rank on all ranks, if the block fails on any rank.

        The text starts with `blame`, and with `name_rank` names the rank unless all ranks failed in
        the same way. The class is a subclass of `UserError` only if every failing rank raised that
        class. A bug is raised unchanged where it happened, and as a `PeerError` on other ranks.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        shared = None if failure is None else for_all_ranks(failure, self.world.rank)
        # A failed rank takes part before it raises: otherwise the others would wait forever.
        everyone: list[SharedError | None] = self.gather(shared)
        if failure is not None and isinstance(shared, PeerError):
            raise failure
        if any(error is not None for error in everyone):
            raise error_of_all(everyone, blame, name_rank=name_rank) from failure


def error_of_all(
    everyone: Sequence[SharedError | None], blame: str = "", *, name_rank: bool = False
) -> SharedError:
    """Return the error that all ranks raise, from the errors of each rank in rank order."""
    failures = [error for error in everyone if error is not None]
    first = failures[0]
    if isinstance(first, PeerError):  # a bug on the rank of `first`
        return first
    are_equal = None not in everyone and len(set(map(str, everyone))) == 1
    prefixes = [blame] * bool(blame)
    if name_rank and not are_equal:
        prefixes.append(f"rank {everyone.index(first)}")
    kind = type(first)
    if isinstance(first, UserError) and not all(isinstance(error, kind) for error in failures):
        kind = UserError
    if kind is type(first) and not prefixes:
        return first
    return kind(": ".join([*prefixes, str(first)]))


class PlannedControl(Control):
    """Control of a dry run, without other ranks: every rank is assumed to pass equal values."""

    def sum(self, values: list[float]) -> list[float]:
        return [value * self.world.size for value in values]

    def gather(self, value: object) -> list[Any]:
        return [value] * self.world.size
