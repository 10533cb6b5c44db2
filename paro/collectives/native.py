"""The backend's own collectives, axis by axis, and over a whole span as a baseline."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from paro.collectives.interface import Collectives, Request
from paro.collectives.schedule import Op
from paro.collectives.wire import as_nested, shard_in
from paro.distributed.comm_stream import DONE, Event
from paro.topology import AxisSpan, StreamKind, nested_range


class NativeCollectives(Collectives):
    """Backend calls axis by axis: gathers from outermost to innermost, reductions in reverse."""

    def run(self, request: Request) -> Event:
        op, whole, span, comm_dtype, shard, after, units = request
        event = after or DONE
        if units > 1 and len(span) > 1:
            return self._run_by_units(request, event)
        if op is Op.ALL_GATHER:
            return self._gather(whole, span, shard, event)
        if op is Op.ALL_REDUCE and span:
            return self._sum(whole, span, comm_dtype, event)
        return self._scatter(whole, span, comm_dtype, event)

    def _gather(self, whole: Tensor, span: AxisSpan, shard: Tensor | None, event: Event) -> Event:
        for depth in reversed(range(len(span))):
            part, axis = shard_in(whole, span[:depth], self._rank), span[depth : depth + 1]
            own = shard_in(part, axis, self._rank) if shard is None else shard
            job = partial(self._gather_now, part, axis, own)
            event = self._submit(StreamKind.GATHER, axis, job, after=event)
            shard = None
        return event

    def _scatter(
        self, whole: Tensor, span: AxisSpan, comm_dtype: torch.dtype, event: Event
    ) -> Event:
        for depth in range(len(span)):
            part, axis = shard_in(whole, span[:depth], self._rank), span[depth : depth + 1]
            job = partial(self._scatter_now, part, axis, comm_dtype)
            event = self._submit(StreamKind.REDUCE, axis, job, after=event)
        return event

    def _sum(self, whole: Tensor, span: AxisSpan, comm_dtype: torch.dtype, event: Event) -> Event:
        inner, outermost = span[:-1], span[-1:]
        event = self._scatter(whole, inner, comm_dtype, event)
        part = shard_in(whole, inner, self._rank)
        job = partial(self._wire.all_reduce, StreamKind.REDUCE, outermost, part, comm_dtype)
        event = self._submit(StreamKind.REDUCE, outermost, job, after=event)
        for depth in reversed(range(len(inner))):
            part, axis = shard_in(whole, inner[:depth], self._rank), inner[depth : depth + 1]
            job = partial(self._spread_now, part, axis, comm_dtype)
            event = self._submit(StreamKind.REDUCE, axis, job, after=event)
        return event

    def _run_by_units(self, request: Request, event: Event) -> Event:
        """Send all units together along the outermost axis, and unit by unit along the others."""
        op, whole, span, comm_dtype, *_ = request
        inner, outermost = span[:-1], span[-1:]
        units = whole.view(request.units, -1)
        parts = units[:, slice(*nested_range(inner, self._rank, units.shape[1]))]
        if op is Op.ALL_GATHER:
            job = partial(self._gather_parts, parts, outermost, request.own(self._rank))
            event = self._submit(StreamKind.GATHER, outermost, job, after=event)
            for unit in units:
                event = self._gather(unit, inner, None, event)
            return event
        for unit in units:
            event = self._scatter(unit, inner, comm_dtype, event)
        job = partial(self._scatter_parts, parts, outermost, comm_dtype)
        return self._submit(StreamKind.REDUCE, outermost, job, after=event)

    def _gather_parts(self, parts: Tensor, axis: AxisSpan, own: Tensor) -> None:
        moved = torch.empty(parts.shape, dtype=parts.dtype, device=parts.device)
        self._wire.all_gather(StreamKind.GATHER, axis, moved.view(-1), own)
        parts.copy_(moved)

    def _scatter_parts(self, parts: Tensor, axis: AxisSpan, comm_dtype: torch.dtype) -> None:
        moved = parts.to(comm_dtype).contiguous().view(-1)
        own = self._wire.reduce_scatter(StreamKind.REDUCE, axis, moved)
        parts[axis[0].digit(self._rank)].copy_(own)

    # Each job converts to the communication dtype and back, so that intermediate results between
    # two axes need no second buffer.

    def _gather_now(self, whole: Tensor, axis: AxisSpan, own: Tensor) -> None:
        if self._groups.copies(StreamKind.GATHER, axis):  # [Note: copy engines]: in place
            own = shard_in(whole, axis, self._rank).copy_(own)
        self._wire.all_gather(StreamKind.GATHER, axis, whole, own)

    def _spread_now(self, whole: Tensor, axis: AxisSpan, comm_dtype: torch.dtype) -> None:
        own = shard_in(whole, axis, self._rank).to(comm_dtype)
        moved = whole if whole.dtype == comm_dtype else torch.empty_like(whole, dtype=comm_dtype)
        self._wire.all_gather(StreamKind.REDUCE, axis, moved, own)
        if moved is not whole:
            whole.copy_(moved)

    def _scatter_now(self, whole: Tensor, axis: AxisSpan, comm_dtype: torch.dtype) -> None:
        own = self._wire.reduce_scatter(StreamKind.REDUCE, axis, whole.to(comm_dtype))
        if whole.dtype != comm_dtype:
            shard_in(whole, axis, self._rank).copy_(own)


class FlatCollectives(Collectives):
    """Baseline: a single backend call over all ranks of a span, plus a permutation.

    Sharding libraries that do not distinguish links inside and between groups work in this way.

    Backends order shards by rank: the most significant digit is the outermost axis. In the nested
    order it is the innermost axis. The permutation needs a second buffer of the whole size.
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
