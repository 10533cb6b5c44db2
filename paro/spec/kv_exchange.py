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
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Route(Enum):
    """A way that keys and values take from rank to rank."""

    INNER = "a ring inside a group"
    OUTER = "a ring between groups"
    COLLECTIVE = "an all-gather, and for gradients a reduce-scatter"


class SendKV(NamedTuple):
    """The start of a send of keys and values to the next rank, or of their all-gather."""

    route: Route
    turn: int
    step: int
    heads: range


class WaitKV(NamedTuple):
    """The wait for the keys and values that the last `SendKV` of a route brings."""

    route: Route


class Attend(NamedTuple):
    """Attention to keys and values, in backward its gradients; turn 0, step 0 are the rank's own.

    Without a ring, steps count the other ranks.
    """

    turn: int
    step: int
    heads: range


class SendGrads(NamedTuple):
    """The start of a send of a sum of gradients to the next rank, or of their reduce-scatter.

    On a ring the rank first waits for the sum of the previous rank, if one is on its way, and adds
    the gradients of (turn, step); between groups also the sum of the group's other ranks.
    """

    route: Route
    turn: int
    step: int
    heads: range


class TakeGrads(NamedTuple):
    """The wait for the last sum of a route, that of the rank's own keys and values."""

    route: Route
    heads: range


Action = SendKV | WaitKV | Attend | SendGrads | TakeGrads


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubleRing:
    """Exchange round an inner ring of `steps` ranks and an outer ring of `turns` ranks."""

    steps: int
    turns: int
    heads: int  # number of heads of keys and values
    item_bytes: int  # bytes of an element of keys and values

    @property
    def ranks(self) -> int:
        """The number of ranks whose keys and values a rank attends to."""
        return self.steps * self.turns

    def forward(self) -> Iterator[Action]:
        """Yield a rank's actions in forward."""
        for turn in range(self.turns):
            yield from self._turn(turn, range(self.heads))

    def backward(self) -> Iterator[Action]:
        """Yield a rank's actions in backward."""
        every = range(self.heads)
        now = self.heads if self.turns == 1 else heads_at_first(self.heads, self.item_bytes)
        yield from self._turn(0, every[:now], is_backward=True)
        for turn in range(1, self.turns):
            yield from self._turn(turn, every, is_backward=True)
        if self.turns > 1:
            yield SendGrads(Route.OUTER, self.turns - 1, 0, every)
            if now < self.heads:
                yield from self._steps(0, every[now:], is_backward=True)
            yield TakeGrads(Route.OUTER, every)

    def _turn(self, turn: int, heads: range, *, is_backward: bool = False) -> Iterator[Action]:
        if is_sent := turn < self.turns - 1:
            yield SendKV(Route.OUTER, turn, 0, range(self.heads))
        yield from self._steps(turn, heads, is_backward=is_backward)
        if is_sent:
            yield WaitKV(Route.OUTER)

    def _steps(self, turn: int, heads: range, *, is_backward: bool) -> Iterator[Action]:
        holds_back = is_backward and turn == 0 and self.steps > 1
        now = heads_at_first(len(heads), self.item_bytes) if holds_back else len(heads)
        for step in range(self.steps):
            if is_sent := step < self.steps - 1:
                yield SendKV(Route.INNER, turn, step, heads)
            yield Attend(turn, step, heads if step else heads[:now])
            if is_backward and step:
                yield SendGrads(Route.INNER, turn, step, heads)
            elif is_backward and turn > 1:
                yield SendGrads(Route.OUTER, turn - 1, 0, heads)
            if is_sent:
                yield WaitKV(Route.INNER)
        if now < len(heads):
            yield Attend(0, 0, heads[now:])
        if holds_back:
            yield TakeGrads(Route.INNER, heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredKV:
    """Exchange by collectives of `ranks` ranks; attention to local keys overlaps with them."""

    ranks: int
    heads: int  # number of heads of keys and values
    item_bytes: int  # bytes of an element of keys and values

    def forward(self) -> Iterator[Action]:
        """Yield a rank's actions in forward."""
        every = range(self.heads)
        yield from self._gathered(every, every)

    def backward(self) -> Iterator[Action]:
        """Yield a rank's actions in backward."""
        every, now = range(self.heads), heads_at_first(self.heads, self.item_bytes)
        yield from self._gathered(every, every[:now])
        yield SendGrads(Route.COLLECTIVE, 0, 0, every)
        if now < self.heads:
            yield Attend(0, 0, every[now:])
        yield TakeGrads(Route.COLLECTIVE, every)

    def _gathered(self, every: range, now: range) -> Iterator[Action]:
        yield SendKV(Route.COLLECTIVE, 0, 0, every)
        yield Attend(0, 0, now)
        yield WaitKV(Route.COLLECTIVE)
        for step in range(1, self.ranks):
            yield Attend(0, step, every)


def heads_at_first(num_kv_heads: int, item_bytes: int) -> int:
    """Return for how many KV heads backward computes the rank's causal block first.

    The block of the other heads is computed last. The first heads hide the arrival of other ranks'
    keys and values (`item_bytes` each), the last heads the sending of their gradients in fp32.
    """
    return max(1, num_kv_heads * item_bytes // (item_bytes + 4))
