"""The narrow interface to collectives over runs of axes, and the choice by name."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from paro.collectives import COLLECTIVES
from paro.collectives.executor import ALGORITHMS, ScheduledCollectives, parts_of
from paro.collectives.flat import FlatCollectives
from paro.collectives.native import NativeCollectives
from paro.groups import Groups, Run, Use, make_groups
from paro.lanes import Event, Job, Lanes
from paro.topology import Topology
from paro.traffic import Traffic


class Collectives(Protocol):
    """Moves flat buffers along a run of neighbouring axes, innermost first in `run`.

    All work in place on nested shards (layout.py): a buffer at the run's coarse end holds this
    rank's shard at the fine end at its own place. Every call queues jobs in the lanes of its axes
    and returns their end; an empty run costs nothing. `travel` is the type on the wire.
    """

    def all_gather(
        self, whole: Tensor, run: Run, *, shard: Tensor | None = None, after: Event | None = None
    ) -> Event:
        """Fills `whole` from the shards of the ranks along `run`.

        This rank's own is `shard`, or lies in `whole` at its place already where none is given.
        """

    def reduce_scatter(
        self, whole: Tensor, run: Run, travel: torch.dtype, *, after: Event | None = None
    ) -> Event:
        """Leaves the sum over `run` in this rank's shard of `whole`; the rest is scratch."""

    def all_reduce(
        self, whole: Tensor, run: Run, travel: torch.dtype, *, after: Event | None = None
    ) -> Event:
        """Leaves the sum over `run` in all of `whole`."""

    def follow(self, run: Run, job: Job, *, after: Event) -> Event:
        """Queues local work behind a reduction over `run`, in the lane that ended it."""

    def close(self) -> None:
        """Ends lanes and groups; every rank calls it when nothing is under way."""


def make_collectives(
    name: str,
    *,
    topology: Topology,
    rank: int,
    runs: dict[Use, frozenset[Run]],
    lanes: Lanes,
    traffic: Traffic,
    timeout: timedelta,
) -> Collectives:
    """The collectives called `name` for the runs that a strategy moves along."""
    groups_for, make = _KINDS[name]
    needed = {use: frozenset(part for run in runs[use] for part in groups_for(run)) for use in runs}
    return make(make_groups(topology, rank, needed, timeout), lanes, traffic)


_Kind = tuple[Callable[[Run], tuple[Run, ...]], Callable[[Groups, Lanes, Traffic], Collectives]]
# By name: the runs that need a process group, and how the collectives are made from groups.
_KINDS: dict[str, _Kind] = {
    "native": (NativeCollectives.groups_for, NativeCollectives),
    "flat": (FlatCollectives.groups_for, FlatCollectives),
    **{name: (partial(parts_of, name), partial(ScheduledCollectives, name)) for name in ALGORITHMS},
}
assert tuple(_KINDS) == COLLECTIVES, f"{tuple(_KINDS)} and {COLLECTIVES} differ"
