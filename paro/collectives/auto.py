"""Collectives that pick an algorithm per call by message size: small ones need few steps."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paro.collectives.choice import BestOf
from paro.collectives.interface import Collectives
from paro.collectives.schedule import Op
from paro.distributed.comm_stream import CommStreams, Event, Job
from paro.distributed.groups import Groups
from paro.topology import AxisSpan, Use, axes_of


class AutoCollectives(Collectives):
    """Delegates every call to the chosen algorithm; all share comm streams and process groups."""

    def __init__(
        self,
        algorithms: Mapping[str, Collectives],
        best: BestOf,
        groups: Groups,
        streams: CommStreams,
    ) -> None:
        super().__init__(groups, streams)
        self._algorithms = algorithms
        self._best_of = best

    def all_gather(
        self,
        whole: Tensor,
        span: AxisSpan,
        *,
        shard: Tensor | None = None,
        after: Event | None = None,
    ) -> Event:
        best = self._best(Op.ALL_GATHER, whole, span, whole.dtype)
        return best.all_gather(whole, span, shard=shard, after=after)

    def reduce_scatter(
        self, whole: Tensor, span: AxisSpan, comm_dtype: torch.dtype, *, after: Event | None = None
    ) -> Event:
        best = self._best(Op.REDUCE_SCATTER, whole, span, comm_dtype)
        return best.reduce_scatter(whole, span, comm_dtype, after=after)

    def all_reduce(
        self, whole: Tensor, span: AxisSpan, comm_dtype: torch.dtype, *, after: Event | None = None
    ) -> Event:
        best = self._best(Op.ALL_REDUCE, whole, span, comm_dtype)
        return best.all_reduce(whole, span, comm_dtype, after=after)

    def run_after(self, span: AxisSpan, job: Job, *, after: Event) -> Event:
        # Any comm stream works: the job waits for the reduction, whichever algorithm ran it.
        return self._streams.submit((Use.REDUCE, span[-1]), job, after=after)

    def _best(self, op: Op, whole: Tensor, span: AxisSpan, comm_dtype: torch.dtype) -> Collectives:
        if not span:
            return next(iter(self._algorithms.values()))
        num_bytes = whole.numel() * comm_dtype.itemsize
        return self._algorithms[self._best_of(op, axes_of(span), num_bytes)]
