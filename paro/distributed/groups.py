"""The process groups of a topology; the only caller of new_group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum

import torch.distributed as dist

from paro.topology import AxisSpan, Topology


class Use(Enum):
    """Gathers, reductions and rotations run in lanes, and so in groups, of their own."""

    GATHER = "gather"
    REDUCE = "reduce"
    ROTATE = "rotate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Every process group of this rank, complete at birth.

    Scalars, barriers and the loading of checkpoints use the default group, from the training thread
    alone.
    """

    topology: Topology
    rank: int
    _by_use_and_run: dict[tuple[Use, AxisSpan], dist.ProcessGroup]

    def of(self, use: Use, run: AxisSpan) -> dist.ProcessGroup:
        """This rank's group along a run of axes."""
        return self._by_use_and_run[use, run]

    def close(self) -> None:
        """Destroys the groups: gloo's threads wake up all the time for as long as they live."""
        while self._by_use_and_run:  # the last reference goes, whoever still holds this object
            dist.destroy_process_group(self._by_use_and_run.popitem()[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveGroups:
    """The groups that saves use, from one thread at a time."""

    world: dist.ProcessGroup
    near: dist.ProcessGroup | None  # the ranks that see this one's folder, where not all do


def make_save_groups(
    folders: Sequence[tuple[int, ...]], rank: int, timeout: timedelta
) -> SaveGroups:
    """Gloo's, under whatever backend: what travels are plans and outcomes; collective."""
    world = dist.new_group(backend="gloo", timeout=timeout)
    near = None
    if len(folders) > 1:
        for members in folders:
            group = dist.new_group(list(members), backend="gloo", timeout=timeout)
            if rank in members:
                near = group
    return SaveGroups(world=world, near=near)


def make_groups(
    topology: Topology, rank: int, runs: dict[Use, frozenset[AxisSpan]], timeout: timedelta
) -> Groups:
    """Creates the groups for `runs`, in one order on all ranks; collective over the world."""
    mine: dict[tuple[Use, AxisSpan], dist.ProcessGroup] = {}
    for use in Use:
        for run in sorted(runs.get(use, ()), key=lambda run: [axis.index for axis in run]):
            seen: set[tuple[int, ...]] = set()
            for other in range(topology.world_size):
                members = topology.members(run, other)
                if members in seen:
                    continue
                seen.add(members)
                group = _make(use, members, timeout)
                if rank in members:
                    mine[use, run] = group
    return Groups(topology=topology, rank=rank, _by_use_and_run=mine)


_Shared = dict[tuple[Use, tuple[int, ...]], dist.ProcessGroup]
_shared: ContextVar[_Shared | None] = ContextVar("_shared", default=None)


@contextmanager
def sharing_groups() -> Iterator[None]:
    """Trainings that are built inside share their groups: for such as take turns in a process.

    A group of gloo takes processor time for as long as it exists. None of them may be closed.
    """
    token = _shared.set({})
    try:
        yield
    finally:
        _shared.reset(token)


def _make(use: Use, members: tuple[int, ...], timeout: timedelta) -> dist.ProcessGroup:
    shared = _shared.get()
    if shared is None:
        return dist.new_group(list(members), timeout=timeout)
    if (use, members) not in shared:
        shared[use, members] = dist.new_group(list(members), timeout=timeout)
    return shared[use, members]
