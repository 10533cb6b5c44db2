"""Executes schedules with point-to-point operations, on one thread per level or without overlap."""

# [Note: two ways to carry out one schedule]
# With overlap every comm stream is a thread: it runs the steps of its level. Receives are posted
# ahead and complete in order, and the thread that receives a chunk immediately sends all messages
# that waited for it, on any level. Messages carry tags, so any thread can send them.
# Without overlap the training thread runs the steps one by one, each a paired send and receive.
#
# The messages of a level are numbered consecutively across collectives; both ends get the same
# numbers because all ranks run the same program.

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from paro.collectives import h_ring, ho_ring, ring
from paro.collectives.interface import Collectives, Request
from paro.collectives.schedule import Hops, Op, count_pieces, cut, make_schedule
from paro.collectives.spans import ring_levels
from paro.collectives.transfer import ChunkedBuffer, Level, Scratch, Transfer
from paro.distributed.comm_stream import DONE, AllEvents, Event
from paro.distributed.groups import Groups
from paro.distributed.links import Links
from paro.topology import AxisSpan, StreamKind

ALGORITHMS: dict[str, Hops] = {
    "ring": ring.hops,
    "h-ring": h_ring.hops,
    "ho-ring": ho_ring.hops,
}


class Ends:
    """Message tags and scratch buffers, shared by all algorithms that use the same groups."""

    def __init__(self) -> None:
        self._next_tags: dict[tuple[StreamKind, AxisSpan], int] = {}
        self._scratch: dict[
            tuple[StreamKind, AxisSpan], Scratch
        ] = {}  # one job at a time per stream

    def level(self, kind: StreamKind, span: AxisSpan, num_messages: int) -> Level:
        """Return the level of one collective that sends `num_messages` messages on it."""
        first_tag = self._next_tags.get((kind, span), 0)
        self._next_tags[kind, span] = first_tag + num_messages
        scratch = self._scratch.setdefault((kind, span), Scratch())
        return Level(stream_kind=kind, span=span, first_tag=first_tag, scratch=scratch)


class ScheduledCollectives(Collectives):
    """Collectives by one of this package's point-to-point algorithms."""

    def __init__(self, name: str, groups: Groups, links: Links, ends: Ends) -> None:
        super().__init__(groups, links)
        self._algorithm = name
        self._ends = ends

    def run(self, request: Request) -> Event:
        op, whole, span, comm_dtype, shard, after, _ = request
        if not span:
            return after or DONE
        own = request._replace(shard=None).own(self._rank)
        if shard is not None and shard.data_ptr() != own.data_ptr():
            outermost = ring_levels(self._algorithm, span)[-1]
            after = self._submit(
                StreamKind.GATHER, outermost, lambda: _copy(own, shard), after=after
            )
        event = self._start(request._replace(after=after))
        if op is not Op.ALL_REDUCE or whole.dtype == comm_dtype:
            return event
        # To the same values as the other ranks received.
        return self.run_after(span, lambda: _copy(own, own.to(comm_dtype)), after=event)

    def _start(self, request: Request) -> Event:
        kind, parts = request.stream_kind, ring_levels(self._algorithm, request.span)
        transfer = self._transfer(request, parts)
        if self._streams.runs_concurrently:
            return AllEvents(
                [
                    self._submit(
                        kind, part, partial(transfer.run_level, level), after=request.after
                    )
                    for level, part in enumerate(parts)
                ]
            )
        # Without overlap a job has run when it has been submitted, that of `after` too.
        for index, step in enumerate(transfer.schedule.steps):
            self._submit(kind, parts[step.level], partial(transfer.run_step, index))
        return DONE

    def _transfer(self, request: Request, parts: Sequence[AxisSpan]) -> Transfer:
        op, whole, span, comm_dtype, *_ = request
        members = self._groups.topology.members(span, self._rank)
        sizes = tuple(len(self._groups.topology.members(part, self._rank)) for part in parts)
        shard_numel = whole.numel() // len(members)
        # The second bound keeps every piece of a small shard non-empty.
        pieces = min(count_pieces(shard_numel * comm_dtype.itemsize), max(1, shard_numel // 8))
        if request.units > 1:  # h-ring joins shards that are not cut: those of units lie apart
            pieces = max(2, pieces)
        hops, place = ALGORITHMS[self._algorithm], members.index(self._rank)
        schedule = make_schedule(op, hops, sizes, place, pieces)
        ranges = [cut(*request.range_of(member), pieces) for member in members]
        levels = [
            self._ends.level(request.stream_kind, part, len(steps))
            for part, steps in zip(parts, schedule.of_level, strict=True)
        ]
        buffer = ChunkedBuffer(whole=whole, comm_dtype=comm_dtype, ranges=ranges)
        return Transfer(schedule, levels, members, buffer, self._wire)


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
