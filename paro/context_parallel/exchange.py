"""Exchanges of keys and values: round a ring of ranks, round two nested ones, or by collectives."""

# [Note: double ring]
# In ring attention a rank attends to the keys and values (KV) that it holds, sends them to the next
# rank of the ring, and receives the KV of the previous rank. Here an inner ring runs inside groups
# and an outer ring between them, as in LoongTrain's DoubleRing attention (arXiv 2406.18485). A turn
# is one step of the outer ring: a rank sends the KV that it has at the turn's start to the next
# group, and meanwhile the inner ring brings the KV that the other ranks of the group had at the
# start. So the links between groups of all ranks of a group are in use at once, where one flat ring
# uses that of a single rank. With 2 groups of 3 ranks, the ring rank whose KV each rank uses, a
# line for each step of the inner ring:
#
#     ring rank            0    1    2  |  3    4    5
#     turn 0               0    1    2  |  3    4    5        meanwhile sent to the other group
#                          2    0    1  |  5    3    4
#                          1    2    0  |  4    5    3
#     turn 1               3    4    5  |  0    1    2
#                          5    3    4  |  2    0    1
#                          4    5    3  |  1    2    0
#
# In backward KV go round again, and the sum of their gradients (dKV) follows one step behind: the
# computation of a rank's own share overlaps with receiving the sum of the previous ranks. The dKV
# of ring rank 0; a -> b: rank a sends the partial sum to rank b, which adds its share:
#
#     turn 0               1 -> 2 -> 0
#     turn 1               4 -> 5 -> 3 -> 0                   the last one to the other group
#
# With more groups the sum goes on from rank 3 through the other groups: 3 -> 6 -> ... -> 0. A few
# heads are held back, so that their computation overlaps with the last sends: some heads of the KV
# at a turn's start with the last send of dKV in the inner ring, some heads of turn 0 with the last
# one in the outer ring.

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from paro.collectives.interface import Collectives, Request
from paro.collectives.schedule import Op
from paro.collectives.shifts import Ring, Turn
from paro.context_parallel.blockwise import AddGrads, Attend, GradsOf, split_heads
from paro.distributed.comm_stream import Event
from paro.topology import AxisSpan, WaitKind, nested_range


class RingKVExchange:
    """A `KVExchange` along the ring `inner`, nested in `outer`; either ring may have size 1."""

    def __init__(self, inner: Ring, outer: Ring) -> None:
        self._inner = inner
        self._outer = outer
        self.ring_rank = inner.position + inner.size * outer.position
        self.ring_size = inner.size * outer.size

    def exchange_kv(self, local_2BTKH: Tensor, attend: Attend) -> None:
        for _, source, kv_2BTKH in self._steps(self._received(self._outer, local_2BTKH)):
            attend(source, kv_2BTKH)

    def exchange_kv_and_grads(self, local_2BTKH: Tensor, grads_of: GradsOf) -> Tensor:
        total = torch.zeros_like(local_2BTKH, dtype=torch.float32)
        if self._outer.size == 1:
            self._turn_0(local_2BTKH, 0, total, grads_of)
            return total
        between = _RingSum(self._outer, total)
        now, later = split_heads(local_2BTKH)
        turns = self._received(self._outer, local_2BTKH)
        next(turns)
        self._turn_0(local_2BTKH[now], 0, total[now], grads_of)
        self._later_turns(turns, between, grads_of)
        self._turn_0(local_2BTKH[later], local_2BTKH[now].shape[3], total[later], grads_of)
        between.receive_into(total)
        return total

    def _turn_0(
        self, local_2BTKH: Tensor, first: int, sum_2BTKH: Tensor, grads_of: GradsOf
    ) -> None:
        """Add the gradients of turn 0 for consecutive heads, from head `first` on."""
        if not local_2BTKH.shape[3]:
            return  # with one head no heads are left for later
        if self._inner.size == 1:
            grads_of(self.ring_rank, local_2BTKH, first)(sum_2BTKH)
            return
        now, later = split_heads(local_2BTKH)
        in_group = _RingSum(self._inner, sum_2BTKH)
        for (_, step), source, kv_2BTKH in self._steps(iter([local_2BTKH.contiguous()])):
            if step:
                in_group.add(grads_of(source, kv_2BTKH, first))
            else:
                grads_of(source, kv_2BTKH[now], first)(sum_2BTKH[now])
        first_later = first + local_2BTKH[now].shape[3]
        grads_of(self.ring_rank, local_2BTKH[later], first_later)(sum_2BTKH[later])
        in_group.receive_into(sum_2BTKH)

    def _later_turns(self, turns: Iterator[Tensor], between: _RingSum, grads_of: GradsOf) -> None:
        """Run the turns after turn 0, and send the last sum to the group that has its KV."""
        in_group = _RingSum(self._inner, between.like)
        started: list[AddGrads] = []  # a turn's own share, not yet summed

        def finish_turn() -> None:
            shares = [started.pop(0)]
            if self._inner.size > 1:
                shares.append(in_group.receive_into)
            between.add(*shares)

        for (turn, step), source, kv_2BTKH in self._steps(turns, 1):
            # No variable has a share: it would stay alive until the next one is computed.
            if step:
                in_group.add(grads_of(source, kv_2BTKH, 0))
                continue
            started.append(grads_of(source, kv_2BTKH, 0))
            if turn > 1:
                finish_turn()
        finish_turn()

    def _steps(
        self, turns: Iterator[Tensor], number: int = 0
    ) -> Iterator[tuple[tuple[int, int], int, Tensor]]:
        """Yield ((turn, step), ring rank, keys and values of the ring rank) as they arrive."""
        buffers: list[Tensor] = []
        for turn, first in enumerate(turns, number):
            for step, kv_2BTKH in enumerate(self._received(self._inner, first, buffers)):
                source = self._inner.owner_of(step) + self._inner.size * self._outer.owner_of(turn)
                yield (turn, step), source, kv_2BTKH

    def _received(
        self, ring: Ring, first: Tensor, buffers: list[Tensor] | None = None
    ) -> Iterator[Tensor]:
        """Yield `first`, then the tensor of each shift; the next shift runs while one is in use."""
        held, buffers = first, [] if buffers is None else buffers
        for number in range(ring.size - 1):
            if len(buffers) < 2:
                buffers.append(torch.empty_like(first))
            incoming = buffers[number % 2]
            event = _shift(ring, held, incoming)
            yield held
            ring.exposure.wait(WaitKind.CONTEXT, event)
            held = incoming
        yield held


class _RingSum:
    """A sum in fp32 that follows keys and values round a ring; every rank adds its share."""

    def __init__(self, ring: Ring, like: Tensor) -> None:
        self._ring = ring
        self.like = like
        self._buffers: list[Tensor] = []  # this rank's sum, and the sum that arrives
        self._event: Event | None = None

    def add(self, *shares: AddGrads) -> None:
        """Add shares to the sum from the previous rank, if any, and send it to the next rank."""
        if self._event is not None:
            self._receive()
        elif self._buffers:
            self._buffers[0].zero_()
        else:
            self._buffers = [torch.zeros_like(self.like), torch.empty_like(self.like)]
        total, incoming = self._buffers
        for share in shares:
            share(total)
        self._event = _shift(self._ring, total, incoming)

    def _receive(self) -> Tensor:
        """Return the sum that has arrived; it is valid until the next `add`."""
        assert self._event is not None, "nothing is on its way"
        self._ring.exposure.wait(WaitKind.CONTEXT, self._event)
        self._event = None
        self._buffers.reverse()
        return self._buffers[0]

    def receive_into(self, total: Tensor) -> None:
        """Add the sum that has arrived to `total`."""
        total += self._receive()


def _shift(ring: Ring, outgoing: Tensor, incoming: Tensor) -> Event:
    with ring.exposure.submitting(WaitKind.CONTEXT):
        return ring.shift(outgoing, incoming, Turn.CLOCKWISE)


class GatherKVExchange:
    """A `KVExchange` by collectives along `span`; attention to local keys overlaps with them."""

    def __init__(self, collectives: Collectives, span: AxisSpan) -> None:
        groups = collectives.groups
        self._collectives = collectives
        self._span = span
        self._members = groups.topology.members(span, groups.rank)
        self.ring_rank = self._members.index(groups.rank)
        self.ring_size = len(self._members)

    def exchange_kv(self, local_2BTKH: Tensor, attend: Attend) -> None:
        whole, event = self._gather(local_2BTKH)
        attend(self.ring_rank, local_2BTKH)
        self._collectives.exposure.wait(WaitKind.CONTEXT, event)
        for source in self._others():
            attend(source, self._part(whole, source).view_as(local_2BTKH))

    def exchange_kv_and_grads(self, local_2BTKH: Tensor, grads_of: GradsOf) -> Tensor:
        whole, event = self._gather(local_2BTKH)
        total = torch.zeros_like(whole, dtype=torch.float32)
        local_grads = self._part(total, self.ring_rank).view_as(local_2BTKH)
        now, later = split_heads(local_2BTKH)
        grads_of(self.ring_rank, local_2BTKH[now], 0)(local_grads[now])
        self._collectives.exposure.wait(WaitKind.CONTEXT, event)
        for source in self._others():
            kv_2BTKH = self._part(whole, source).view_as(local_2BTKH)
            grads_of(source, kv_2BTKH, 0)(self._part(total, source).view_as(local_2BTKH))
        with self._collectives.exposure.submitting(WaitKind.CONTEXT):
            request = Request(Op.REDUCE_SCATTER, total, self._span, torch.float32)
            event = self._collectives.run(request)
        add_grads = grads_of(self.ring_rank, local_2BTKH[later], local_2BTKH[now].shape[3])
        self._collectives.exposure.wait(WaitKind.CONTEXT, event)
        add_grads(local_grads[later])
        return local_grads

    def _gather(self, local_2BTKH: Tensor) -> tuple[Tensor, Event]:
        whole = local_2BTKH.new_empty(self.ring_size * local_2BTKH.numel())
        with self._collectives.exposure.submitting(WaitKind.CONTEXT):
            shard = local_2BTKH.view(-1)
            request = Request(Op.ALL_GATHER, whole, self._span, whole.dtype, shard=shard)
            return whole, self._collectives.run(request)

    def _others(self) -> list[int]:
        return [number for number in range(self.ring_size) if number != self.ring_rank]

    def _part(self, whole: Tensor, ring_rank: int) -> Tensor:
        start, stop = nested_range(self._span, self._members[ring_rank], whole.numel())
        return whole[start:stop]
