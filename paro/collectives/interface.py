"""What every algorithm offers: moves of flat buffers along a run of neighbouring axes."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from paro.distributed.comm_stream import Event, Job
from paro.topology import AxisSpan


class Collectives(Protocol):
    """Moves flat buffers along a run of neighbouring axes, innermost first in `run`.

    All work in place on nested shards (layout.py): a buffer at the run's coarse end holds this
    rank's shard at the fine end at its own place. Every call queues jobs in the lanes of its axes
    and returns their end; an empty run costs nothing. `comm_dtype` is the type on the wire.
    """

    def all_gather(
        self,
        whole: Tensor,
        run: AxisSpan,
        *,
        shard: Tensor | None = None,
        after: Event | None = None,
    ) -> Event:
        """Fills `whole` from the shards of the ranks along `run`.

        This rank's own is `shard`, or lies in `whole` at its place already where none is given.
        """

    def reduce_scatter(
        self, whole: Tensor, run: AxisSpan, comm_dtype: torch.dtype, *, after: Event | None = None
    ) -> Event:
        """Leaves the sum over `run` in this rank's shard of `whole`; the rest is scratch."""

    def all_reduce(
        self, whole: Tensor, run: AxisSpan, comm_dtype: torch.dtype, *, after: Event | None = None
    ) -> Event:
        """Leaves the sum over `run` in all of `whole`."""

    def run_after(self, run: AxisSpan, job: Job, *, after: Event) -> Event:
        """Queues local work behind a reduction over `run`, in the lane that ended it."""

    def close(self) -> None:
        """Ends lanes and groups; every rank calls it when nothing is under way."""
