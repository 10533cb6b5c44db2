"""Runs pipelines: HO-Ring by the backend's own collectives, on one comm stream per level."""

# Under NCCL a launch costs more than a small message, so HO-Ring is not a schedule of messages
# (scheduled.py) but NCCL's own collectives: a buffer is cut into chunks, and every chunk passes the
# stages of pipeline.py, one level after the other. A stage is a job on the comm stream of its
# level, so one level works on a chunk while the other level works on the next chunk. Stages hand a
# chunk on in a slot of scratch memory; the chunks of all collectives of a span take slots in turn.

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from paro.collectives.choice import ChunkCount, has_both_links, ring_levels
from paro.collectives.interface import CollectiveRequest, Collectives
from paro.collectives.native import NativeCollectives
from paro.collectives.pipeline import PipelineStage, chunk_ranges, make_pipeline, scratch_shards
from paro.collectives.schedule import Op
from paro.collectives.scheduled import MessageBuffers
from paro.collectives.wire import Wire, as_nested
from paro.distributed.comm_stream import DONE, AllEvents, Event
from paro.topology import AxisSpan, StreamKind


@dataclass(eq=False)
class PipelinedCollectives(Collectives):
    """HO-Ring as a pipeline; over one kind of links the backend's collectives, axis by axis."""

    num_chunks: ChunkCount

    _algorithm = "ho-ring"
    _pipelined = True

    def __post_init__(self) -> None:
        self._memory: dict[tuple[StreamKind, AxisSpan], _Memory] = {}

    def run(self, request: CollectiveRequest) -> Event:
        op, kind, span = request.op, request.stream_kind, request.span
        if not has_both_links(span):
            return NativeCollectives(self.groups).run(request)
        own = request.own(self.groups.rank)
        ranges = chunk_ranges(own.numel(), self.num_chunks(op, span, request.num_bytes))
        shards = scratch_shards(span)
        memory = self._memory.setdefault((kind, span), _Memory([DONE] * len(shards[:-1])))
        slots = [(memory.num_chunks + chunk) % len(memory.left) for chunk in range(len(ranges))]
        memory.num_chunks += len(ranges)
        wires = [Wire(self.groups, kind, level) for level in ring_levels("ho-ring", span)]
        jobs = _StageJobs(request, own, wires, ranges, slots, shards, memory.scratch)
        done: list[Event] = []  # completion of each stage
        for stage in make_pipeline(op, len(ranges)):
            slot = slots[stage.chunk]
            if stage.after is not None:
                ready = done[stage.after]
            else:  # later chunks follow the first chunk on the same comm stream
                first = (request.after,) if stage.chunk == 0 else ()
                ready = AllEvents([*first, memory.left[slot]])
            level = wires[stage.level].span
            done.append(self._submit(kind, level, partial(jobs.run, stage), after=ready))
            if stage.is_last:
                memory.left[slot] = done[-1]
        return done[-1]


@dataclass(slots=True)
class _Memory:
    """Slots in which the collectives of a span hand chunks on, used in turn."""

    left: list[Event]  # [slot] -> end of last use
    scratch: MessageBuffers = field(default_factory=MessageBuffers)
    num_chunks: int = 0  # number of chunks that have used the slots so far


@dataclass(frozen=True, slots=True)
class _StageJobs:
    """Jobs of a pipeline's stages."""

    request: CollectiveRequest
    own: Tensor  # this rank's shard of the whole buffer
    wires: list[Wire]  # [level]
    ranges: list[tuple[int, int]]  # [chunk] -> (start, stop) in every shard
    slots: list[int]  # [chunk] -> slot of scratch memory
    shards: list[int]  # [slot] -> shards of a chunk that it has room for; the last: all
    scratch: MessageBuffers

    def run(self, stage: PipelineStage) -> None:
        """Run the backend's collective of a stage on one chunk."""
        chunk, wire = stage.chunk, self.wires[stage.level]
        levels = [wire.span for wire in self.wires]
        handoff = by_rank = self._scratch(self.slots[chunk], chunk)
        if stage.level == 0:  # the chunk of all shards, in the order of backends
            by_rank = self._scratch(-1, chunk)
        match stage.op, stage.level:
            case Op.ALL_REDUCE, _:
                wire.all_reduce(handoff, self.request.comm_dtype)
            case Op.ALL_GATHER, 1:
                wire.all_gather(handoff, self._own_chunk(chunk))
            case Op.ALL_GATHER, _:
                wire.all_gather(by_rank, handoff)
                self._chunk(chunk).copy_(as_nested(by_rank, *levels))
            case Op.REDUCE_SCATTER, 1:
                self._own_chunk(chunk).copy_(wire.reduce_scatter(handoff))
            case _:
                as_nested(by_rank, *levels).copy_(self._chunk(chunk))
                handoff.copy_(wire.reduce_scatter(by_rank))

    def _own_chunk(self, chunk: int) -> Tensor:
        return self.own[slice(*self.ranges[chunk])]

    def _chunk(self, chunk: int) -> Tensor:
        """Return a chunk of all shards: a dim per axis, innermost first, and one for elements."""
        return self.request.nested()[..., slice(*self.ranges[chunk])]

    def _scratch(self, slot: int, chunk: int) -> Tensor:
        numel = self.shards[slot] * self._own_chunk(chunk).numel()
        return self.scratch.slot(slot, numel, self.request.comm_dtype, self.request.whole.device)
