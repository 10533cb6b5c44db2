"""The backend's own collectives, axis by axis; the reference in tests."""

from __future__ import annotations

import torch
from torch import Tensor

from paro.collectives.interface import Collectives, Request
from paro.collectives.schedule import Op
from paro.collectives.wire import shard_in
from paro.distributed.comm_stream import DONE, Event, Job
from paro.topology import Axis, AxisSpan, Use


class NativeCollectives(Collectives):
    """One backend call per axis: gathers from outermost to innermost, reductions in reverse."""

    def run(self, request: Request) -> Event:
        op, whole, span, comm_dtype, shard, after = request
        event = after or DONE
        if op is Op.ALL_GATHER:
            return self._gather(whole, span, shard, event)
        if op is Op.ALL_REDUCE and span:
            return self._sum(whole, span, comm_dtype, event)
        return self._scatter(whole, span, comm_dtype, event)

    def _gather(self, whole: Tensor, span: AxisSpan, shard: Tensor | None, event: Event) -> Event:
        for depth in reversed(range(len(span))):
            part = shard_in(whole, span[:depth], self._rank)
            own = shard_in(part, (span[depth],), self._rank) if shard is None else shard
            event = self._submit(
                Use.GATHER, span[depth], self._gather_job(part, span[depth], own), event
            )
            shard = None
        return event

    def _scatter(
        self, whole: Tensor, span: AxisSpan, comm_dtype: torch.dtype, event: Event
    ) -> Event:
        for depth, axis in enumerate(span):
            part = shard_in(whole, span[:depth], self._rank)
            event = self._submit(Use.REDUCE, axis, self._scatter_job(part, axis, comm_dtype), event)
        return event

    def _sum(self, whole: Tensor, span: AxisSpan, comm_dtype: torch.dtype, event: Event) -> Event:
        inner, outermost = span[:-1], span[-1]
        event = self._scatter(whole, inner, comm_dtype, event)
        part = shard_in(whole, inner, self._rank)
        event = self._submit(
            Use.REDUCE,
            outermost,
            lambda: self._wire.all_reduce(Use.REDUCE, (outermost,), part, comm_dtype),
            event,
        )
        for depth in reversed(range(len(inner))):
            outer = shard_in(whole, inner[:depth], self._rank)
            job = self._spread_job(outer, inner[depth], comm_dtype)
            event = self._submit(Use.REDUCE, inner[depth], job, event)
        return event

    def run_after(self, span: AxisSpan, job: Job, *, after: Event) -> Event:
        return self._submit(Use.REDUCE, span[-1], job, after)

    def _submit(self, use: Use, axis: Axis, job: Job, after: Event) -> Event:
        return self._streams.submit((use, axis), job, after=after)

    # Each job converts to the communication dtype and back, so that intermediate results between
    # two axes need no second buffer.

    def _gather_job(self, whole: Tensor, axis: Axis, own: Tensor) -> Job:
        def job() -> None:
            sent = own
            if self._groups.copies(Use.GATHER, (axis,)):  # [Note: copy engines]: in place
                sent = shard_in(whole, (axis,), self._rank).copy_(own)
            self._wire.all_gather(Use.GATHER, (axis,), whole, sent)

        return job

    def _spread_job(self, whole: Tensor, axis: Axis, comm_dtype: torch.dtype) -> Job:
        def job() -> None:
            own = shard_in(whole, (axis,), self._rank).to(comm_dtype)
            moved = (
                whole if whole.dtype == comm_dtype else torch.empty_like(whole, dtype=comm_dtype)
            )
            self._wire.all_gather(Use.REDUCE, (axis,), moved, own)
            if moved is not whole:
                whole.copy_(moved)

        return job

    def _scatter_job(self, whole: Tensor, axis: Axis, comm_dtype: torch.dtype) -> Job:
        def job() -> None:
            own = self._wire.reduce_scatter(Use.REDUCE, (axis,), whole.to(comm_dtype))
            if whole.dtype != comm_dtype:
                shard_in(whole, (axis,), self._rank).copy_(own)

        return job
