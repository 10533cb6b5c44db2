"""Baseline: one backend collective over all ranks of an axis span, plus a permutation."""

from __future__ import annotations

import torch
from torch import Tensor

from paro.collectives.interface import Collectives
from paro.collectives.wire import Wire, shard_in
from paro.distributed.byte_counter import ByteCounter
from paro.distributed.comm_stream import DONE, CommStreams, Event, Job
from paro.distributed.groups import Groups
from paro.topology import AxisSpan, Use


class FlatCollectives(Collectives):
    """What a sharding library does that does not distinguish links inside and between groups.

    Backends order shards by rank, whose most significant digit is the outermost axis; in the nested
    order that is the innermost axis. The permutation needs an extra whole buffer.
    """

    def __init__(self, groups: Groups, streams: CommStreams, traffic: ByteCounter) -> None:
        super().__init__(groups, streams)
        self._wire = Wire(groups, traffic)

    def all_gather(
        self,
        whole: Tensor,
        run: AxisSpan,
        *,
        shard: Tensor | None = None,
        after: Event | None = None,
    ) -> Event:
        def job() -> None:
            own = shard_in(whole, run, self._rank) if shard is None else shard
            by_rank = torch.empty_like(whole)
            self._wire.all_gather(Use.GATHER, run, by_rank, own)
            _nested(whole, run).copy_(_by_rank_as_nested(by_rank, run))

        return self._submit(Use.GATHER, run, job, after)

    def reduce_scatter(
        self, whole: Tensor, run: AxisSpan, comm_dtype: torch.dtype, *, after: Event | None = None
    ) -> Event:
        def job() -> None:
            by_rank = torch.empty_like(whole, dtype=comm_dtype)
            _by_rank_as_nested(by_rank, run).copy_(_nested(whole, run))
            own = self._wire.reduce_scatter(Use.REDUCE, run, by_rank)
            shard_in(whole, run, self._rank).copy_(own)

        return self._submit(Use.REDUCE, run, job, after)

    def all_reduce(
        self, whole: Tensor, run: AxisSpan, comm_dtype: torch.dtype, *, after: Event | None = None
    ) -> Event:
        def job() -> None:
            self._wire.all_reduce(Use.REDUCE, run, whole, comm_dtype)

        return self._submit(Use.REDUCE, run, job, after)

    def run_after(self, run: AxisSpan, job: Job, *, after: Event) -> Event:
        return self._submit(Use.REDUCE, run, job, after)

    def _submit(self, use: Use, run: AxisSpan, job: Job, after: Event | None) -> Event:
        if not run:
            return after or DONE
        return self._streams.submit((use, *run), job, after=after)


def _nested(whole: Tensor, run: AxisSpan) -> Tensor:
    """A nested buffer viewed with one dim per axis, innermost first, and one for shard elements."""
    return whole.view(*(axis.size for axis in run), -1)


def _by_rank_as_nested(by_rank: Tensor, run: AxisSpan) -> Tensor:
    """A buffer in rank order, viewed with the dims of `_nested`."""
    num_axes = len(run)
    seen = by_rank.view(*(axis.size for axis in reversed(run)), -1)
    return seen.permute(*reversed(range(num_axes)), num_axes)
