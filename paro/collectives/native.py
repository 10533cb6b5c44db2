"""The backend's own collectives, axis by axis, and over a whole span as a baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from paro.collectives.interface import CollectiveRequest, Collectives
from paro.collectives.schedule import Op
from paro.collectives.wire import Wire, as_nested
from paro.distributed.comm_stream import Event
from paro.topology import nested_range

# A collective along one axis: (wire, all of its buffer, this rank's part, type on the wire).
BackendCall = Callable[[Wire, Tensor, Tensor, torch.dtype], None]


class NativeCollectives(Collectives):
    """Backend calls axis by axis: gathers from outermost to innermost, reductions in reverse.

    Along the outermost axis all units are sent together, along the others unit by unit.
    """

    def run(self, request: CollectiveRequest) -> Event:
        op, depths, event = request.op, range(len(request.span)), request.after
        if op is Op.ALL_GATHER:
            return self._run(_gather, request, reversed(depths), event)
        if op is Op.REDUCE_SCATTER or not depths:
            return self._run(_scatter, request, depths, event)
        *inner, outermost = depths
        event = self._run(_scatter, request, inner, event)
        event = self._run(_sum, request, [outermost], event)
        return self._run(_gather, request, reversed(inner), event)

    def _run(
        self, call: BackendCall, request: CollectiveRequest, depths: Iterable[int], event: Event
    ) -> Event:
        """Queue a backend call along each of the axes at `depths` of the span."""
        kind, span, shard = request.stream_kind, request.span, request.shard
        units = request.whole.view(request.units, -1)
        for depth in depths:
            parts = units[:, slice(*nested_range(span[:depth], self.groups.rank, units.shape[1]))]
            wire = Wire(self.groups, kind, span[depth : depth + 1])
            for part in [parts] if depth + 1 == len(span) else parts.split(1):
                row = wire.row(part) if shard is None else shard
                job = partial(call, wire, part, row, request.comm_dtype)
                event = self._submit(kind, wire.span, job, after=event)
            shard = None
        return event


# Each job converts to the communication dtype and back, so that intermediate results between two
# axes need no second buffer.


def _gather(wire: Wire, part: Tensor, shard: Tensor, comm_dtype: torch.dtype) -> None:
    is_direct = part.dtype == comm_dtype and part.is_contiguous()
    if is_direct and wire.groups.copies(wire.kind, wire.span):  # [Note: copy engines]: in place
        shard = wire.row(part).copy_(shard)
    moved = part if is_direct else torch.empty(part.shape, dtype=comm_dtype, device=part.device)
    wire.all_gather(moved.view(-1), shard.to(comm_dtype))
    if not is_direct:
        part.copy_(moved)


def _sum(wire: Wire, part: Tensor, _row: Tensor, comm_dtype: torch.dtype) -> None:
    wire.all_reduce(part.view(-1), comm_dtype)


def _scatter(wire: Wire, part: Tensor, row: Tensor, comm_dtype: torch.dtype) -> None:
    moved = part.to(comm_dtype).contiguous()
    total = wire.reduce_scatter(moved.view(-1))
    if moved is not part:
        row.copy_(total)


class FlatCollectives(Collectives):
    """Baseline: a single backend call over all ranks of a span, plus a permutation.

    Sharding libraries that do not distinguish links inside and between groups work in this way.

    Backends order shards by rank: the most significant digit is the outermost axis. In the nested
    order it is the innermost axis. The permutation needs a second buffer of the whole size.
    """

    _algorithm = "flat"

    def run(self, request: CollectiveRequest) -> Event:
        whole, span, comm_dtype = request.whole, request.span, request.comm_dtype
        if not span:
            return request.after
        wire = Wire(self.groups, request.stream_kind, span)

        def job() -> None:
            if request.op is Op.ALL_REDUCE:
                wire.all_reduce(whole, comm_dtype)
                return
            by_rank = torch.empty_like(whole, dtype=comm_dtype)
            shard = request.own(self.groups.rank)
            if request.op is Op.ALL_GATHER:
                wire.all_gather(by_rank, shard)
                request.nested().copy_(as_nested(by_rank, span))
            else:
                as_nested(by_rank, span).copy_(request.nested())
                shard.copy_(wire.reduce_scatter(by_rank))

        return self._submit(request.stream_kind, span, job, after=request.after)
