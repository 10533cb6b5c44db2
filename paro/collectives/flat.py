"""Baseline: one backend collective over all ranks of an axis span, plus a permutation."""

from __future__ import annotations

import torch

from paro.collectives.interface import Collectives, Request
from paro.collectives.schedule import Op
from paro.collectives.wire import as_nested
from paro.distributed.comm_stream import DONE, Event
from paro.topology import StreamKind


class FlatCollectives(Collectives):
    """What a sharding library does that does not distinguish links inside and between groups.

    Backends order shards by rank, whose most significant digit is the outermost axis; in the nested
    order that is the innermost axis. The permutation needs an extra whole buffer.
    """

    _algorithm = "flat"

    def run(self, request: Request) -> Event:
        whole, span, comm_dtype = request.whole, request.span, request.comm_dtype
        if not span:
            return request.after or DONE

        def gather() -> None:
            by_rank = torch.empty_like(whole)
            self._wire.all_gather(StreamKind.GATHER, span, by_rank, request.own(self._rank))
            request.nested().copy_(as_nested(by_rank, span))

        def scatter() -> None:
            by_rank = torch.empty_like(whole, dtype=comm_dtype)
            as_nested(by_rank, span).copy_(request.nested())
            own = self._wire.reduce_scatter(StreamKind.REDUCE, span, by_rank)
            request.own(self._rank).copy_(own)

        def add_up() -> None:
            self._wire.all_reduce(StreamKind.REDUCE, span, whole, comm_dtype)

        jobs = {Op.ALL_GATHER: gather, Op.REDUCE_SCATTER: scatter, Op.ALL_REDUCE: add_up}
        return self._submit(request.stream_kind, span, jobs[request.op], after=request.after)
