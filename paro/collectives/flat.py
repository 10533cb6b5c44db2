"""Baseline: one backend collective over all ranks of an axis span, plus a permutation."""

from __future__ import annotations

import torch
from torch import Tensor

from paro.collectives.interface import Collectives, Request
from paro.collectives.schedule import Op
from paro.collectives.wire import shard_in
from paro.distributed.comm_stream import DONE, Event, Job
from paro.topology import AxisSpan, Use


class FlatCollectives(Collectives):
    """What a sharding library does that does not distinguish links inside and between groups.

    Backends order shards by rank, whose most significant digit is the outermost axis; in the nested
    order that is the innermost axis. The permutation needs an extra whole buffer.
    """

    def run(self, request: Request) -> Event:
        whole, span, comm_dtype = request.whole, request.span, request.comm_dtype

        def gather() -> None:
            by_rank = torch.empty_like(whole)
            self._wire.all_gather(Use.GATHER, span, by_rank, request.own(self._rank))
            _nested(whole, span).copy_(_by_rank_as_nested(by_rank, span))

        def scatter() -> None:
            by_rank = torch.empty_like(whole, dtype=comm_dtype)
            _by_rank_as_nested(by_rank, span).copy_(_nested(whole, span))
            own = self._wire.reduce_scatter(Use.REDUCE, span, by_rank)
            shard_in(whole, span, self._rank).copy_(own)

        def add_up() -> None:
            self._wire.all_reduce(Use.REDUCE, span, whole, comm_dtype)

        jobs = {Op.ALL_GATHER: gather, Op.REDUCE_SCATTER: scatter, Op.ALL_REDUCE: add_up}
        return self._submit(request.use, span, jobs[request.op], request.after)

    def run_after(self, span: AxisSpan, job: Job, *, after: Event) -> Event:
        return self._submit(Use.REDUCE, span, job, after)

    def _submit(self, use: Use, span: AxisSpan, job: Job, after: Event | None) -> Event:
        if not span:
            return after or DONE
        return self._streams.submit((use, *span), job, after=after)


def _nested(whole: Tensor, span: AxisSpan) -> Tensor:
    """A nested buffer viewed with one dim per axis, innermost first, and one for shard elements."""
    return whole.view(*(axis.size for axis in span), -1)


def _by_rank_as_nested(by_rank: Tensor, span: AxisSpan) -> Tensor:
    """A buffer in rank order, viewed with the dims of `_nested`."""
    num_axes = len(span)
    seen = by_rank.view(*(axis.size for axis in reversed(span)), -1)
    return seen.permute(*reversed(range(num_axes)), num_axes)
