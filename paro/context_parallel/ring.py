"""Keys and values that travel round a ring, or round two nested ones, while others are used."""

# [Note: double ring]
# With a ring inside groups and one between them, a rank holds at first its own keys and values. In
# every turn the inner ring brings those of the whole group, which the ranks of a group held at the
# turn's begin; meanwhile the outer ring sends what this rank held then to the next group, so that
# all ranks of a group send between groups at the same time, and each rank sends as much as in one
# flat ring. 2 groups of 3 ranks; what each uses, step by step:
#
#     rank                 0    1    2  |  3    4    5
#     turn 0               0    1    2  |  3    4    5        meanwhile to the other group
#                          2    0    1  |  5    3    4
#                          1    2    0  |  4    5    3
#     turn 1               3    4    5  |  0    1    2
#                          5    3    4  |  2    0    1
#                          4    5    3  |  1    2    0
#
# Gradients go the same way. Inside a turn the sum begins at the second rank that used the keys,
# follows them and ends where the turn began; there it joins the sum between groups, which begins in
# the second group and ends at the owner. What the owner adds stays with it. So sums travel as
# often as keys do, one step after these: a sum is awaited when the next share is computed. For the
# last one of a ring nothing would be left to compute: of turn 0, and of a turn's own keys in it, a
# part of the heads is left for then.

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from paro.collectives.shifts import Ring, Turn
from paro.context_parallel.partwise import GradsOf, See, Share, in_two
from paro.distributed.comm_stream import Event
from paro.distributed.exposed_time import Exposure, WaitKind
from paro.distributed.groups import Groups
from paro.distributed.links import Links
from paro.spec.context_layout import ContextLayout
from paro.topology import Use


class RingTravel:
    """A `Travel` along `inner`, nested in `outer`; either may have one place."""

    def __init__(self, inner: Ring, outer: Ring, exposure: Exposure) -> None:
        self._inner = inner
        self._outer = outer
        self._exposure = exposure
        self.place = inner.position + inner.size * outer.position
        self.num_places = inner.size * outer.size

    def visit(self, own_2BTKH: Tensor, see: See) -> None:
        for _, source, kv_2BTKH in self._steps(self._held(self._outer, own_2BTKH)):
            see(source, kv_2BTKH)

    def collect(self, own_2BTKH: Tensor, grads_of: GradsOf) -> Tensor:
        home = torch.zeros_like(own_2BTKH, dtype=torch.float32)
        if self._outer.size == 1:
            self._collect_own(own_2BTKH, 0, home, grads_of)
            return home
        between = _Sum(self._outer, home, self._exposure)
        now, later = in_two(own_2BTKH)
        turns = self._held(self._outer, own_2BTKH)
        next(turns)
        self._collect_own(own_2BTKH[now], 0, home[now], grads_of)
        self._collect_others(turns, home, between, grads_of)
        self._collect_own(own_2BTKH[later], own_2BTKH[now].shape[3], home[later], grads_of)
        between.take_to(home)
        return home

    def _collect_others(
        self, turns: Iterator[Tensor], home: Tensor, between: _Sum, grads_of: GradsOf
    ) -> None:
        """The turns after turn 0; the sum between groups is on its way home at the end."""
        in_group = _Sum(self._inner, home, self._exposure)
        begun: list[Share] = []  # of the turn that is not settled yet

        def settle() -> None:
            shares = [begun.pop(0)]
            if self._inner.size > 1:
                shares.append(in_group.take_to)
            between.add(*shares)

        for (turn, step), source, kv_2BTKH in self._steps(turns, 1):
            # No name for a share: it would live until the next one has been computed.
            if step:
                in_group.add(grads_of(source, kv_2BTKH, 0))
                continue
            begun.append(grads_of(source, kv_2BTKH, 0))
            if turn > 1:
                settle()
        settle()

    def _collect_own(
        self, own_2BTKH: Tensor, first: int, home_2BTKH: Tensor, grads_of: GradsOf
    ) -> None:
        """Turn 0 for some heads in a row, of which `first` is the first: adds their sum at home."""
        if not own_2BTKH.shape[3]:
            return  # one head leaves none for later
        if self._inner.size == 1:
            grads_of(self.place, own_2BTKH, first)(home_2BTKH)
            return
        now, later = in_two(own_2BTKH)
        total = _Sum(self._inner, home_2BTKH, self._exposure)
        for (_, step), source, kv_2BTKH in self._steps(iter([own_2BTKH.contiguous()])):
            if step:
                total.add(grads_of(source, kv_2BTKH, first))
            else:
                grads_of(source, kv_2BTKH[now], first)(home_2BTKH[now])
        grads_of(self.place, own_2BTKH[later], first + own_2BTKH[now].shape[3])(home_2BTKH[later])
        total.take_to(home_2BTKH)

    def _steps(
        self, turns: Iterator[Tensor], number: int = 0
    ) -> Iterator[tuple[tuple[int, int], int, Tensor]]:
        """Turn and step, the place whose keys and values are here, and these."""
        room: list[Tensor] = []
        for turn, first in enumerate(turns, number):
            for step, held in enumerate(self._held(self._inner, first, room)):
                source = self._inner.home_of(step) + self._inner.size * self._outer.home_of(turn)
                yield (turn, step), source, held

    def _held(
        self, ring: Ring, first: Tensor, room: list[Tensor] | None = None
    ) -> Iterator[Tensor]:
        """`first`, then what the ranks before held; the next arrives while one is in use."""
        held, room = first, [] if room is None else room
        for number in range(ring.size - 1):
            if len(room) < 2:
                room.append(torch.empty_like(first))
            arriving = room[number % 2]
            event = _shift(ring, held, arriving, self._exposure)
            yield held
            self._exposure.wait(WaitKind.CONTEXT, event)
            held = arriving
        yield held


def make_rings(layout: ContextLayout, groups: Groups, links: Links) -> RingTravel:
    """The rings of a `layout`."""
    spans = layout.rings(groups.topology)
    inner, outer = (Ring(Use.CONTEXT, span, groups, links) for span in spans)
    return RingTravel(inner, outer, links.exposure)


class _Sum:
    """A sum in fp32 that follows keys and values round a ring: every rank adds and sends it on."""

    def __init__(self, ring: Ring, like: Tensor, exposure: Exposure) -> None:
        self._ring = ring
        self._like = like
        self._exposure = exposure
        self._room: list[Tensor] = []  # the sum here, and the one that arrives
        self._event: Event | None = None

    def add(self, *shares: Share) -> None:
        """Adds to the sum of the ranks before, if any, and sends it to the next."""
        if self._event is not None:
            self.take()
        elif self._room:
            self._room[0].zero_()
        else:
            self._room = [torch.zeros_like(self._like), torch.empty_like(self._like)]
        total, arriving = self._room
        for share in shares:
            share(total)
        self._event = _shift(self._ring, total, arriving, self._exposure)

    def take(self) -> Tensor:
        """The sum that has arrived here, until the next `add`."""
        assert self._event is not None, "nothing is on its way"
        self._exposure.wait(WaitKind.CONTEXT, self._event)
        self._event = None
        self._room.reverse()
        return self._room[0]

    def take_to(self, total: Tensor) -> None:
        """Adds the sum that has arrived here."""
        total += self.take()


def _shift(ring: Ring, outgoing: Tensor, incoming: Tensor, exposure: Exposure) -> Event:
    with exposure.submitting(WaitKind.CONTEXT):
        return ring.shift(outgoing, incoming, Turn.CLOCKWISE)
