"""Exchanges keys and values between context-parallel ranks: round rings, or by collectives."""

# `make_context_attention` (attention.py) chooses a `KVExchange`. The order of its
# actions, which the planner counts too, is in paro/spec/kv_exchange.py.

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from paro.collectives.interface import CollectiveRequest, Collectives
from paro.collectives.schedule import Op
from paro.collectives.shifts import Ring, ShiftDirection
from paro.context_parallel.blockwise import AddGrads, AttendTo, GradsOf
from paro.distributed.comm_stream import DONE, Event
from paro.distributed.groups import Groups
from paro.spec.kv_exchange import (
    AttendKV,
    DoubleRing,
    GatheredKV,
    KVRoute,
    SendKV,
    SendKVGrads,
    WaitKV,
    WaitKVGrads,
)
from paro.topology import StreamKind, WaitKind, nested_range


def _select_heads(x_2BTKH: Tensor, heads: range) -> Tensor:
    return x_2BTKH[..., heads.start : heads.stop, :]


class RingKVExchange:
    """A `KVExchange` by point-to-point messages round an inner ring, nested in an outer one."""

    def __init__(self, exchange: DoubleRing, groups: Groups) -> None:
        self._exchange = exchange
        self._rings = {
            route: Ring(groups, StreamKind.CONTEXT, span) for route, span in exchange.spans.items()
        }
        inner, outer = self._rings.values()
        self.ring_rank = inner.position + inner.size * outer.position
        self.ring_size = inner.size * outer.size

    def exchange_kv(self, local_2BTKH: Tensor, attend: AttendTo) -> None:
        kv = _RingKV(self._exchange, self._rings, local_2BTKH)
        for action in self._exchange.forward(local_2BTKH.shape[3]):
            match action:
                case AttendKV():
                    attend(*kv.attended(action))
                case SendKV() | WaitKV():
                    kv.run(action)

    def exchange_kv_and_grads(self, local_2BTKH: Tensor, grads_of: GradsOf) -> Tensor:
        kv = _RingKV(self._exchange, self._rings, local_2BTKH)
        grads = _RingGrads(self._rings, local_2BTKH)
        for action in self._exchange.backward(local_2BTKH.shape[3], local_2BTKH.itemsize):
            match action:
                case AttendKV():  # gradients have no variable, to be freed once summed
                    grads.add(action, grads_of(*kv.attended(action), action.heads.start))
                case SendKVGrads() | WaitKVGrads():
                    grads.run(action)
                case SendKV() | WaitKV():
                    kv.run(action)
        return grads.total_2BTKH


class _RingKV:
    """Keys and values that go round two rings, in a forward or a backward of attention."""

    def __init__(
        self, exchange: DoubleRing, rings: dict[KVRoute, Ring], local_2BTKH: Tensor
    ) -> None:
        self._exchange, self._rings = exchange, rings
        self._local = local_2BTKH
        self._held = {KVRoute.OUTER: local_2BTKH}
        # Receive buffers of each ring, used in turn; the newest is the last.
        self._buffers: dict[KVRoute, list[Tensor]] = {route: [] for route in rings}
        self._events: dict[KVRoute, Event] = {}

    def run(self, action: SendKV | WaitKV) -> None:
        """Start a send, or wait for its end."""
        route, ring = action.route, self._rings[action.route]
        buffers = self._buffers[route]
        if isinstance(action, WaitKV):
            ring.exposed_timer.wait(WaitKind.CONTEXT, self._events.pop(route))
            self._held[route] = buffers[-1]
            return
        if route is KVRoute.INNER and action.step == 0:
            first = self._held[KVRoute.OUTER] if action.turn else self._local
            self._held[route] = _select_heads(first, action.heads).contiguous()
        held = self._held[route]
        is_full = len(buffers) == self._exchange.receive_buffers(route)
        buffers.append(buffers.pop(0) if is_full else torch.empty_like(held))
        self._events[route] = _shift(ring, held, buffers[-1])

    def attended(self, action: AttendKV) -> tuple[int, Tensor]:
        """Return (ring rank, keys and values) that an action attends to."""
        turn, step, heads = action
        inner, outer = self._rings[KVRoute.INNER], self._rings[KVRoute.OUTER]
        source = inner.owner_of(step) + inner.size * outer.owner_of(turn)
        if turn == step == 0:
            return source, _select_heads(self._local, heads)
        route, is_last = KVRoute.OUTER, turn == outer.size - 1
        if step:
            route, is_last = KVRoute.INNER, step == inner.size - 1
        kv_2BTKH = self._held[route]
        if is_last:  # frees the ring's memory
            del self._held[route]
            self._buffers[route].clear()
        return source, kv_2BTKH


class _RingGrads:
    """The dKV of a backward: the sum of a rank's own, and sums that go round rings."""

    def __init__(self, rings: dict[KVRoute, Ring], local_2BTKH: Tensor) -> None:
        self._rings = rings
        self.total_2BTKH = torch.zeros_like(local_2BTKH, dtype=torch.float32)
        self._shares: dict[tuple[int, int], AddGrads] = {}  # by turn and step, not yet in a sum
        self._sums: dict[KVRoute, _RingSum] = {}

    def add(self, action: AttendKV, share: AddGrads) -> None:
        """Add the rank's own dKV; keep the dKV of other ranks' keys until their sums are sent."""
        if action.turn == action.step == 0:
            share(_select_heads(self.total_2BTKH, action.heads))
        else:
            self._shares[action.turn, action.step] = share

    def run(self, action: SendKVGrads | WaitKVGrads) -> None:
        """Add this rank's dKV to a sum and send it, or add the sum that arrived to its own dKV."""
        own_2BTKH, route = _select_heads(self.total_2BTKH, action.heads), action.route
        if isinstance(action, WaitKVGrads):
            self._sums.pop(route).receive_into(own_2BTKH)
            return
        shares = [self._shares.pop((action.turn, action.step))]
        if route is KVRoute.OUTER and KVRoute.INNER in self._sums:
            shares.append(self._sums.pop(KVRoute.INNER).receive_into)
        if route not in self._sums:
            self._sums[route] = _RingSum(self._rings[route], own_2BTKH)
        self._sums[route].add(shares)


class _RingSum:
    """A sum in fp32 that follows keys and values round a ring; every rank adds its share."""

    def __init__(self, ring: Ring, like: Tensor) -> None:
        self._ring = ring
        # The sum that arrives, and this rank's.
        self._buffers = [torch.empty_like(like), torch.zeros_like(like)]
        self._event: Event = DONE

    def add(self, shares: list[AddGrads]) -> None:
        """Add shares to the sum from the previous rank, if any, and send it to the next rank."""
        total = self._receive()
        for share in shares:
            share(total)
        self._event = _shift(self._ring, total, self._buffers[1])

    def _receive(self) -> Tensor:
        """Return the sum that has arrived, at first zeros; it is valid until the next `add`."""
        self._ring.exposed_timer.wait(WaitKind.CONTEXT, self._event)
        self._buffers.reverse()
        return self._buffers[0]

    def receive_into(self, total: Tensor) -> None:
        """Add the sum that has arrived to `total`."""
        total += self._receive()


def _shift(ring: Ring, outgoing: Tensor, incoming: Tensor) -> Event:
    with ring.exposed_timer.submitting(WaitKind.CONTEXT):
        return ring.shift(outgoing, incoming, ShiftDirection.CLOCKWISE)


class GatherKVExchange:
    """A `KVExchange` by collectives, which overlap with attention to the rank's own keys."""

    def __init__(self, exchange: GatheredKV, collectives: Collectives) -> None:
        groups = collectives.groups
        self._exchange, self._collectives = exchange, collectives
        self._members = groups.topology.members(exchange.span, groups.rank)
        self.ring_rank = self._members.index(groups.rank)
        self.ring_size = len(self._members)
        others = [number for number in range(self.ring_size) if number != self.ring_rank]
        self._sources = self.ring_rank, *others  # the ring rank of each step

    def exchange_kv(self, local_2BTKH: Tensor, attend: AttendTo) -> None:
        gathered = local_2BTKH.new_empty(self.ring_size * local_2BTKH.numel())
        for action in self._exchange.forward(local_2BTKH.shape[3]):
            match action:
                case AttendKV():
                    attend(*self._attended(action, local_2BTKH, gathered))
                case SendKV():
                    event = self._start(Op.ALL_GATHER, gathered, local_2BTKH.view(-1))
                case WaitKV():
                    self._collectives.exposed_timer.wait(WaitKind.CONTEXT, event)

    def exchange_kv_and_grads(self, local_2BTKH: Tensor, grads_of: GradsOf) -> Tensor:
        gathered = local_2BTKH.new_empty(self.ring_size * local_2BTKH.numel())
        total = torch.empty_like(gathered, dtype=torch.float32)
        own_2BTKH = self._part(total, self.ring_rank).view_as(local_2BTKH)
        late: list[Callable[[], None]] = []  # what is computed while the sums are reduced
        is_reduced = False
        for action in self._exchange.backward(local_2BTKH.shape[3], local_2BTKH.itemsize):
            match action:
                case AttendKV(_, _, heads):
                    source, kv_2BTKH = self._attended(action, local_2BTKH, gathered)
                    sum_2BTKH = _select_heads(self._part(total, source).view_as(local_2BTKH), heads)
                    if is_reduced:
                        late.append(partial(grads_of(source, kv_2BTKH, heads.start), sum_2BTKH))
                    else:  # gradients have no variable, to be freed once summed
                        grads_of(source, kv_2BTKH, heads.start)(sum_2BTKH)
                case SendKV():
                    event = self._start(Op.ALL_GATHER, gathered, local_2BTKH.view(-1))
                    total.zero_()
                case SendKVGrads():
                    event, is_reduced = self._start(Op.REDUCE_SCATTER, total), True
                case WaitKV() | WaitKVGrads():
                    self._collectives.exposed_timer.wait(WaitKind.CONTEXT, event)
        for add in late:
            add()
        return own_2BTKH

    def _start(self, op: Op, whole: Tensor, shard: Tensor | None = None) -> Event:
        with self._collectives.exposed_timer.submitting(WaitKind.CONTEXT):
            return self._collectives.run(
                CollectiveRequest(op, whole, self._exchange.span, whole.dtype, shard=shard)
            )

    def _attended(
        self, action: AttendKV, local_2BTKH: Tensor, gathered: Tensor
    ) -> tuple[int, Tensor]:
        source = self._sources[action.step]
        if action.step == 0:
            return source, _select_heads(local_2BTKH, action.heads)
        return source, self._part(gathered, source).view_as(local_2BTKH)

    def _part(self, whole: Tensor, ring_rank: int) -> Tensor:
        start, stop = nested_range(self._exchange.span, self._members[ring_rank], whole.numel())
        return whole[start:stop]
