"""Runs pipelines: HO-Ring by the backend's own collectives, on one comm stream per level."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import prod

from torch import Tensor

from paro.collectives.choice import Pieces
from paro.collectives.executor import stream_of
from paro.collectives.interface import Collectives, Request
from paro.collectives.native import NativeCollectives
from paro.collectives.pipeline import SLOTS, PipelineStage, cut_evenly, make_pipeline
from paro.collectives.schedule import Op
from paro.collectives.spans import group_spans, has_both_links, ring_levels
from paro.collectives.transfer import Scratch
from paro.collectives.wire import Wire
from paro.distributed.comm_stream import DONE, AllEvents, Event, Job
from paro.distributed.groups import Groups
from paro.distributed.links import Links
from paro.layout import ALIGN
from paro.topology import AxisSpan, Use


class PipelinedCollectives(Collectives):
    """Pipelines over both kinds of links; over a single one the backend's own, axis by axis."""

    def __init__(self, groups: Groups, links: Links, pieces: Pieces) -> None:
        super().__init__(groups, links)
        self._native = NativeCollectives(groups, links)
        self._pieces = pieces
        self._memory: dict[tuple[Use, AxisSpan], _Memory] = {}

    def run(self, request: Request) -> Event:
        op, span, own = request.op, request.span, request.own(self._rank)
        if not has_both_links(span):
            return self._native.run(request)
        pieces = self._pieces(op, span, request.num_bytes)
        ranges = cut_evenly(own.numel(), min(pieces, max(1, own.numel() // ALIGN)), ALIGN)
        memory = self._memory.setdefault((request.use, span), _Memory())
        slots = [memory.next_slot() for _ in ranges]
        jobs = _StageJobs(self._wire, _PiecedBuffer(request, own, ranges), slots, memory.scratch)
        ends: list[Event] = []
        for stage in make_pipeline(op, len(ranges)):
            slot = slots[stage.piece]
            if stage.after is not None:
                ready = ends[stage.after]
            else:  # the pieces after the first follow it on the same comm stream
                first = (request.after or DONE,) if stage.piece == 0 else ()
                ready = AllEvents([*first, memory.left[slot]])
            stream = stream_of(request.use, jobs.levels[stage.level])
            ends.append(self._streams.submit(stream, jobs.job(stage), after=ready))
            if stage.is_last:
                memory.left[slot] = ends[-1]
        return ends[-1]

    def run_after(self, span: AxisSpan, job: Job, *, after: Event) -> Event:
        stream = stream_of(Use.REDUCE, group_spans("ho-ring", span, pipelined=True)[-1])
        return self._streams.submit(stream, job, after=after)


@dataclass(slots=True)
class _Memory:
    """The memory in which the collectives of a span hand pieces on, one slot after another."""

    scratch: Scratch = field(default_factory=Scratch)
    left: list[Event] = field(default_factory=lambda: [DONE] * SLOTS)  # by the last piece in a slot
    _pieces: Iterator[int] = field(default_factory=count)

    def next_slot(self) -> int:
        return next(self._pieces) % SLOTS


@dataclass(frozen=True, slots=True)
class _PiecedBuffer:
    """What one collective works on: the whole, this rank's shard of it, and the pieces' ranges."""

    request: Request
    own: Tensor
    ranges: list[tuple[int, int]]  # of a piece, in every shard

    def own_piece(self, piece: int) -> Tensor:
        return self.own[slice(*self.ranges[piece])]

    def piece(self, piece: int) -> Tensor:
        """A piece of all shards: a dim per axis, innermost first, and one for elements."""
        nested = self.request.whole.view(*(axis.size for axis in self.request.span), -1)
        return nested[..., slice(*self.ranges[piece])]

    def as_nested(self, by_rank: Tensor, inner: AxisSpan, outer: AxisSpan) -> Tensor:
        """A piece of all shards in the order of backends, as a view with the dims of `piece`.

        Backends order by rank: by rank of the inner level, then by rank of the outer one; the most
        significant digit of a rank is that of its outermost axis.
        """
        sizes = [axis.size for part in (inner, outer) for axis in reversed(part)]
        dims = [*reversed(range(len(inner))), *reversed(range(len(inner), len(sizes)))]
        return by_rank.view(*sizes, -1).permute(*dims, len(sizes))


class _StageJobs:
    """One pipeline in execution: a job for each stage."""

    def __init__(
        self, wire: Wire, buffer: _PiecedBuffer, slots: list[int], scratch: Scratch
    ) -> None:
        self.levels = ring_levels("ho-ring", buffer.request.span)
        self._wire = wire
        self._use = buffer.request.use
        self._buffer = buffer
        self._slots = slots
        self._scratch = scratch

    def job(self, stage: PipelineStage) -> Job:
        carry_out = {
            Op.ALL_GATHER: self._gather,
            Op.REDUCE_SCATTER: self._reduce_scatter,
            Op.ALL_REDUCE: self._all_reduce,
        }[stage.op]
        return lambda: carry_out(stage.level, stage.piece)

    def _gather(self, level: int, piece: int) -> None:
        handed = self._handed(piece)
        if level == 1:
            own = self._buffer.own_piece(piece)
            self._wire.all_gather(self._use, self.levels[1], handed, own)
            return
        by_rank = self._inside(piece)
        self._wire.all_gather(self._use, self.levels[0], by_rank, handed)
        self._buffer.piece(piece).copy_(self._buffer.as_nested(by_rank, *self.levels))

    def _reduce_scatter(self, level: int, piece: int) -> None:
        handed = self._handed(piece)
        if level == 1:
            own = self._wire.reduce_scatter(self._use, self.levels[1], handed)
            self._buffer.own_piece(piece).copy_(own)
            return
        by_rank = self._inside(piece)
        self._buffer.as_nested(by_rank, *self.levels).copy_(self._buffer.piece(piece))
        handed.copy_(self._wire.reduce_scatter(self._use, self.levels[0], by_rank))

    def _all_reduce(self, level: int, piece: int) -> None:
        handed = self._handed(piece)
        comm_dtype = self._buffer.request.comm_dtype
        self._wire.all_reduce(self._use, self.levels[level], handed, comm_dtype)

    def _handed(self, piece: int) -> Tensor:
        """The piece as stages hand it on: of the shards that this rank exchanges between groups."""
        return self._room(self._slots[piece], piece, self.levels[1:])

    def _inside(self, piece: int) -> Tensor:
        """The piece of all shards; jobs use this memory one by one, on level 0's comm stream."""
        return self._room(SLOTS, piece, self.levels)

    def _room(self, slot: int, piece: int, levels: Sequence[AxisSpan]) -> Tensor:
        num_shards = prod(axis.size for level in levels for axis in level)
        numel = num_shards * self._buffer.own_piece(piece).numel()
        request = self._buffer.request
        return self._scratch.slot(slot, numel, request.comm_dtype, request.whole.device)
