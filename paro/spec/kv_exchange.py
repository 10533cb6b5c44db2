"""Exchange of keys and values among ranks that share a sample: a rank's actions, in order."""

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
# In backward KV go round again. The gradients of a rank's KV (dKV) are a sum with a share of every
# rank: the sum follows its KV round the ring, one step behind, and while it is on its way to a
# rank, the rank computes its share. The dKV of ring rank 0; a -> b: rank a sends the partial sum to
# rank b, which adds its share:
#
#     turn 0               1 -> 2 -> 0
#     turn 1               4 -> 5 -> 3 -> 0                   the last one to the other group
#
# With more groups the sum goes on from rank 3 through the other groups: 3 -> 6 -> ... -> 0.
#
# The last send of a ring would overlap with nothing. So a rank computes its own dKV (turn 0, step
# 0) for some heads first and for the rest last, under the last send of the inner ring. Between
# groups likewise: all of turn 0 is run for some heads first and for the rest last, under the last
# send of the outer ring.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import NamedTuple

from paro.topology import AxisSpan

_RECEIVE_BUFFERS = 2  # of a ring: while keys and values are sent from one, others arrive in another


class KVRoute(Enum):
    """A way on which a rank's keys and values reach other ranks."""

    INNER = "a ring inside a group"
    OUTER = "a ring between groups"
    COLLECTIVE = "an all-gather, and for gradients a reduce-scatter"


class SendKV(NamedTuple):
    """The start of a send of keys and values to the next rank of a ring, or of their all-gather."""

    route: KVRoute
    turn: int  # number of shifts of the outer ring before it
    step: int  # number of shifts of the inner ring before it, in this turn
    heads: range  # of keys and values


class WaitKV(NamedTuple):
    """The wait for the keys and values that the last `SendKV` of a route brings."""

    route: KVRoute


class AttendKV(NamedTuple):
    """The attention of a rank's queries to the keys and values of one rank, or its backward.

    At turn 0, step 0 they are this rank's own.
    """

    turn: int  # number of shifts of the outer ring before it
    step: int  # of the inner ring, in this turn; after an all-gather the number of the other rank
    heads: range  # of keys and values


class SendKVGrads(NamedTuple):
    """The start of a send of summed dKV to the next rank of a ring, or of their reduce-scatter.

    On a ring the rank first receives the sum of the previous rank, if one is on its way, and adds
    its own dKV of (`turn`, `step`); between groups also the sum of the other ranks of its group.
    """

    route: KVRoute
    turn: int
    step: int
    heads: range


class WaitKVGrads(NamedTuple):
    """The wait for the sum of this rank's dKV that a route (a ring, or a collective) brings."""

    route: KVRoute
    heads: range


KVAction = SendKV | WaitKV | AttendKV | SendKVGrads | WaitKVGrads


@dataclass(frozen=True, slots=True)
class DoubleRing:
    """An exchange of keys and values round an inner ring, nested in an outer one."""

    inner: AxisSpan  # axes of the rank mesh; none is a ring of one rank
    outer: AxisSpan

    @property
    def steps(self) -> int:
        """The number of ranks of the inner ring."""
        return prod(axis.size for axis in self.inner)

    @property
    def turns(self) -> int:
        """The number of ranks of the outer ring."""
        return prod(axis.size for axis in self.outer)

    @property
    def ranks(self) -> int:
        """The number of ranks whose keys and values a rank attends to."""
        return self.steps * self.turns

    @property
    def spans(self) -> dict[KVRoute, AxisSpan]:
        """The axes along which each route runs."""
        return {KVRoute.INNER: self.inner, KVRoute.OUTER: self.outer}

    def receive_buffers(self, route: KVRoute) -> int:
        """Return the number of buffers that a ring receives keys and values into, in turn."""
        return min(_RECEIVE_BUFFERS, prod(axis.size for axis in self.spans[route]) - 1)

    def forward(self, heads: int) -> Iterator[KVAction]:
        """Yield a rank's actions in forward, for `heads` heads of keys and values."""
        for turn in range(self.turns):
            yield from self._turn(turn, range(heads), range(heads))

    def backward(self, heads: int, item_bytes: int) -> Iterator[KVAction]:
        """Yield a rank's actions in backward; an element of keys and values has `item_bytes`."""
        every = range(heads)
        now = heads if self.turns == 1 else heads_at_first(heads, item_bytes)
        yield from self._turn(0, every, every[:now], item_bytes)
        for turn in range(1, self.turns):
            yield from self._turn(turn, every, every, item_bytes)
        if self.turns > 1:
            yield SendKVGrads(KVRoute.OUTER, self.turns - 1, 0, every)
            if now < heads:
                yield from self._steps(0, every[now:], item_bytes)
            yield WaitKVGrads(KVRoute.OUTER, every)

    def _turn(
        self, turn: int, every: range, heads: range, item_bytes: int | None = None
    ) -> Iterator[KVAction]:
        """Yield the actions of a turn for some heads; all are sent. Backward has `item_bytes`."""
        is_sent = turn < self.turns - 1
        if is_sent:
            yield SendKV(KVRoute.OUTER, turn, 0, every)
        yield from self._steps(turn, heads, item_bytes)
        if is_sent:
            yield WaitKV(KVRoute.OUTER)

    def _steps(self, turn: int, heads: range, item_bytes: int | None) -> Iterator[KVAction]:
        """Yield the actions of a turn's inner ring; backward has `item_bytes`."""
        is_backward, now = item_bytes is not None, len(heads)
        if item_bytes is not None and turn == 0 and self.steps > 1:
            now = heads_at_first(len(heads), item_bytes)
        for step in range(self.steps):
            if is_sent := step < self.steps - 1:
                yield SendKV(KVRoute.INNER, turn, step, heads)
            yield AttendKV(turn, step, heads if step else heads[:now])
            if is_backward and step:
                yield SendKVGrads(KVRoute.INNER, turn, step, heads)
            elif is_backward and turn > 1:
                yield SendKVGrads(KVRoute.OUTER, turn - 1, 0, heads)
            if is_sent:
                yield WaitKV(KVRoute.INNER)
        if now < len(heads):
            yield AttendKV(0, 0, heads[now:])
        if is_backward and turn == 0 and self.steps > 1:
            yield WaitKVGrads(KVRoute.INNER, heads)


@dataclass(frozen=True, slots=True)
class GatheredKV:
    """An exchange of keys and values by collectives; the rank's own ones are attended meanwhile."""

    span: AxisSpan  # axes of the rank mesh

    @property
    def ranks(self) -> int:
        """The number of ranks whose keys and values a rank attends to."""
        return prod(axis.size for axis in self.span)

    @property
    def spans(self) -> dict[KVRoute, AxisSpan]:
        """The axes along which each route runs."""
        return {KVRoute.COLLECTIVE: self.span}

    def forward(self, heads: int) -> Iterator[KVAction]:
        """Yield a rank's actions in forward, for `heads` heads of keys and values."""
        yield from self._gathered(range(heads), heads)

    def backward(self, heads: int, item_bytes: int) -> Iterator[KVAction]:
        """Yield a rank's actions in backward; an element of keys and values has `item_bytes`."""
        every, now = range(heads), heads_at_first(heads, item_bytes)
        yield from self._gathered(every, now)
        yield SendKVGrads(KVRoute.COLLECTIVE, 0, 0, every)
        if now < heads:
            yield AttendKV(0, 0, every[now:])
        yield WaitKVGrads(KVRoute.COLLECTIVE, every)

    def _gathered(self, every: range, now: int) -> Iterator[KVAction]:
        yield SendKV(KVRoute.COLLECTIVE, 0, 0, every)
        yield AttendKV(0, 0, every[:now])
        yield WaitKV(KVRoute.COLLECTIVE)
        for step in range(1, self.ranks):
            yield AttendKV(0, step, every)


def heads_at_first(num_kv_heads: int, item_bytes: int) -> int:
    """Return for how many KV heads backward computes the rank's causal block first.

    The block of the other heads is computed last. The first heads hide the arrival of other ranks'
    keys and values (`item_bytes` each), the last heads the sending of their gradients in fp32.
    """
    return max(1, num_kv_heads * item_bytes // (item_bytes + 4))
