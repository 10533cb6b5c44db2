"""Keys and values of all ranks of a ring by one all-gather, gradients by one reduce-scatter."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch
from torch import Tensor

from paro.collectives.api import make_collectives
from paro.collectives.choice import AlgorithmChoice
from paro.collectives.interface import Collectives, Request
from paro.collectives.schedule import Op
from paro.context_parallel.blockwise import Attend, GradsOf, in_two
from paro.distributed.comm_stream import CommStreams, Event, Job
from paro.distributed.exposed_time import WaitKind
from paro.distributed.groups import Groups
from paro.spec.context_layout import ContextLayout
from paro.topology import AxisSpan, StreamKind, nested_range


class GatherKVExchange:
    """A `KVExchange` by collectives along `span`; attention to own keys overlaps with them."""

    def __init__(self, collectives: Collectives, span: AxisSpan) -> None:
        groups = collectives.groups
        self._collectives = collectives
        self._span = span
        self._members = groups.topology.members(span, groups.rank)
        self._exposure = groups.links.exposure
        self.ring_rank = self._members.index(groups.rank)
        self.ring_size = len(self._members)

    def exchange_kv(self, own_2BTKH: Tensor, attend: Attend) -> None:
        whole, event = self._gather(own_2BTKH)
        attend(self.ring_rank, own_2BTKH)
        self._exposure.wait(WaitKind.CONTEXT, event)
        for source in self._others():
            attend(source, self._part(whole, source).view_as(own_2BTKH))

    def exchange_kv_and_grads(self, own_2BTKH: Tensor, grads_of: GradsOf) -> Tensor:
        whole, event = self._gather(own_2BTKH)
        total = torch.zeros_like(whole, dtype=torch.float32)
        own_grads = self._part(total, self.ring_rank).view_as(own_2BTKH)
        now, later = in_two(own_2BTKH)
        grads_of(self.ring_rank, own_2BTKH[now], 0)(own_grads[now])
        self._exposure.wait(WaitKind.CONTEXT, event)
        for source in self._others():
            kv_2BTKH = self._part(whole, source).view_as(own_2BTKH)
            grads_of(source, kv_2BTKH, 0)(self._part(total, source).view_as(own_2BTKH))
        with self._exposure.submitting(WaitKind.CONTEXT):
            request = Request(Op.REDUCE_SCATTER, total, self._span, torch.float32)
            event = self._collectives.run(request)
        add_grads = grads_of(self.ring_rank, own_2BTKH[later], own_2BTKH[now].shape[3])
        self._exposure.wait(WaitKind.CONTEXT, event)
        add_grads(own_grads[later])
        return own_grads

    def _gather(self, own_2BTKH: Tensor) -> tuple[Tensor, Event]:
        whole = own_2BTKH.new_empty(self.ring_size * own_2BTKH.numel())
        with self._exposure.submitting(WaitKind.CONTEXT):
            own = own_2BTKH.view(-1)
            request = Request(Op.ALL_GATHER, whole, self._span, whole.dtype, shard=own)
            return whole, self._collectives.run(request)

    def _others(self) -> list[int]:
        return [number for number in range(self.ring_size) if number != self.ring_rank]

    def _part(self, whole: Tensor, ring_rank: int) -> Tensor:
        start, stop = nested_range(self._span, self._members[ring_rank], whole.numel())
        return whole[start:stop]


class ContextStreams:
    """Comm streams of attention, so that it never waits behind the engine's collectives."""

    def __init__(self, streams: CommStreams) -> None:
        self._streams = streams
        self.runs_concurrently = streams.runs_concurrently

    def submit(self, stream: Hashable, job: Job, *, after: Event | None = None) -> Event:
        assert isinstance(stream, tuple)
        return self._streams.submit((StreamKind.CONTEXT, *stream[1:]), job, after=after)

    def close(self) -> None:
        """Do nothing: the engine closes the collectives."""


def make_gather(layout: ContextLayout, groups: Groups, choice: AlgorithmChoice) -> GatherKVExchange:
    """Return the gathers of a `layout`."""
    links = replace(groups.links, streams=ContextStreams(groups.links.streams))
    collectives = make_collectives(choice, replace(groups, links=links))
    return GatherKVExchange(collectives, layout.ring_span(groups.topology))
