"""Runs pipelines: HO-Ring by the backend's own collectives, on one comm stream per level."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import prod

from torch import Tensor

from paro.collectives.choice import Pieces
from paro.collectives.interface import Collectives, Request
from paro.collectives.native import NativeCollectives
from paro.collectives.pipeline import SLOTS, PipelineStage, make_pipeline, piece_ranges
from paro.collectives.schedule import Op
from paro.collectives.spans import has_both_links, ring_levels
from paro.collectives.transfer import Scratch
from paro.collectives.wire import Wire, as_nested
from paro.distributed.comm_stream import DONE, AllEvents, Event, Job
from paro.distributed.groups import Groups
from paro.distributed.links import Links
from paro.topology import AxisSpan, StreamKind


class PipelinedCollectives(Collectives):
    """Pipelines over both kinds of links; over a single one the backend's own, axis by axis."""

    _algorithm = "ho-ring"
    _pipelined = True

    def __init__(self, groups: Groups, links: Links, pieces: Pieces) -> None:
        super().__init__(groups, links)
        self._native = NativeCollectives(groups, links)
        self._pieces = pieces
        self._memory: dict[tuple[StreamKind, AxisSpan], _Memory] = {}

    def run(self, request: Request) -> Event:
        op, span, own = request.op, request.span, request.own(self._rank)
        if not has_both_links(span):
            return self._native.run(request)
        pieces = self._pieces(op, span, request.num_bytes)
        ranges = piece_ranges(own.numel(), pieces)
        memory = self._memory.setdefault((request.stream_kind, span), _Memory())
        slots = [memory.next_slot() for _ in ranges]
        jobs = _StageJobs(
            wire=self._wire,
            request=request,
            own=own,
            ranges=ranges,
            levels=ring_levels("ho-ring", span),
            slots=slots,
            scratch=memory.scratch,
        )
        ends: list[Event] = []
        for stage in make_pipeline(op, len(ranges)):
            slot = slots[stage.piece]
            if stage.after is not None:
                ready = ends[stage.after]
            else:  # the pieces after the first follow it on the same comm stream
                first = (request.after or DONE,) if stage.piece == 0 else ()
                ready = AllEvents([*first, memory.left[slot]])
            part = jobs.levels[stage.level]
            ends.append(self._submit(request.stream_kind, part, jobs.job(stage), after=ready))
            if stage.is_last:
                memory.left[slot] = ends[-1]
        return ends[-1]


@dataclass(slots=True)
class _Memory:
    """The memory in which the collectives of a span hand pieces on, one slot after another."""

    scratch: Scratch = field(default_factory=Scratch)
    left: list[Event] = field(default_factory=lambda: [DONE] * SLOTS)  # by the last piece in a slot
    _pieces: Iterator[int] = field(default_factory=count)

    def next_slot(self) -> int:
        return next(self._pieces) % SLOTS


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageJobs:
    """One pipeline in execution: a job for each stage."""

    wire: Wire
    request: Request
    own: Tensor  # this rank's shard of the whole
    ranges: list[tuple[int, int]]  # of a piece, in every shard
    levels: tuple[AxisSpan, ...]
    slots: list[int]  # of a piece
    scratch: Scratch

    def job(self, stage: PipelineStage) -> Job:
        carry_out = {
            Op.ALL_GATHER: self._gather,
            Op.REDUCE_SCATTER: self._reduce_scatter,
            Op.ALL_REDUCE: self._all_reduce,
        }[stage.op]
        return lambda: carry_out(stage.level, stage.piece)

    def _gather(self, level: int, piece: int) -> None:
        kind, handed = self.request.stream_kind, self._handed(piece)
        if level == 1:
            self.wire.all_gather(kind, self.levels[1], handed, self._own_piece(piece))
            return
        by_rank = self._inside(piece)
        self.wire.all_gather(kind, self.levels[0], by_rank, handed)
        self._piece(piece).copy_(as_nested(by_rank, *self.levels))

    def _reduce_scatter(self, level: int, piece: int) -> None:
        kind, handed = self.request.stream_kind, self._handed(piece)
        if level == 1:
            self._own_piece(piece).copy_(self.wire.reduce_scatter(kind, self.levels[1], handed))
            return
        by_rank = self._inside(piece)
        as_nested(by_rank, *self.levels).copy_(self._piece(piece))
        handed.copy_(self.wire.reduce_scatter(kind, self.levels[0], by_rank))

    def _all_reduce(self, level: int, piece: int) -> None:
        kind, comm_dtype = self.request.stream_kind, self.request.comm_dtype
        self.wire.all_reduce(kind, self.levels[level], self._handed(piece), comm_dtype)

    def _own_piece(self, piece: int) -> Tensor:
        return self.own[slice(*self.ranges[piece])]

    def _piece(self, piece: int) -> Tensor:
        """Return a piece of all shards: a dim per axis, innermost first, and one for elements."""
        return self.request.nested()[..., slice(*self.ranges[piece])]

    def _handed(self, piece: int) -> Tensor:
        """Return the piece as stages hand it on: of the shards that this rank exchanges between
        groups."""
        return self._room(self.slots[piece], piece, self.levels[1:])

    def _inside(self, piece: int) -> Tensor:
        """Return the piece of all shards; jobs use this memory one by one, on level 0's comm
        stream."""
        return self._room(SLOTS, piece, self.levels)

    def _room(self, slot: int, piece: int, levels: Sequence[AxisSpan]) -> Tensor:
        num_shards = prod(axis.size for level in levels for axis in level)
        numel = num_shards * self._own_piece(piece).numel()
        return self.scratch.slot(slot, numel, self.request.comm_dtype, self.request.whole.device)
