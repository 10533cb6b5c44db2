"""Pipelines: HO-Ring of the backend's own collectives, chunk by chunk, on two levels at once."""

# For NCCL, where a launch costs more than a small message: a collective over both levels is cut
# into chunks, and each chunk goes through the levels one stage after another. Level 1 is between
# groups, level 0 inside them; a stage is one backend collective on the comm stream of its level.
# All-gather of three chunks, time to the right:
#
#     level 1    gather 0   gather 1   gather 2
#     level 0               gather 0   gather 1   gather 2
#
#     collective        stages of a chunk
#     all-gather        gather on level 1, gather on level 0
#     reduce-scatter    reduce-scatter on level 0, reduce-scatter on level 1
#     all-reduce        reduce-scatter on level 0, all-reduce on level 1, gather on level 0
#
# Both levels send the bytes of HO-Ring's formulas (hops.py). All of the shorter level except one
# chunk overlaps with the longer level: T = max(outer, inner) + min(outer, inner) / num_chunks, plus
# a latency for every stage.
#
# Stages hand a chunk on in one of `SLOTS` buffers, which the chunks of all collectives use in turn:
# a chunk enters the pipeline once the previous user of the buffer has left the pipeline.

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

from paro.collectives.choice import ring_levels
from paro.collectives.schedule import Op
from paro.layout import ALIGN
from paro.topology import AxisSpan

MAX_CHUNKS = 8
SLOTS = 2
_DEFAULT_CHUNKS = 4
_LEAST_BYTES = 8 << 20  # smallest chunk of the whole buffer, in bytes

_STAGES = {
    Op.ALL_GATHER: ((1, Op.ALL_GATHER), (0, Op.ALL_GATHER)),
    Op.REDUCE_SCATTER: ((0, Op.REDUCE_SCATTER), (1, Op.REDUCE_SCATTER)),
    Op.ALL_REDUCE: ((0, Op.REDUCE_SCATTER), (1, Op.ALL_REDUCE), (0, Op.ALL_GATHER)),
}


class PipelineStage(NamedTuple):
    """A backend collective of one chunk on one level, after the stage with the index `after`."""

    level: int
    op: Op
    chunk: int
    after: int | None  # index of the chunk's previous stage; None: the chunk's first stage
    is_last: bool  # whether the chunk leaves the pipeline after this stage


@lru_cache(maxsize=64)
def make_pipeline(op: Op, num_chunks: int) -> tuple[PipelineStage, ...]:
    """Return the stages of a collective over two levels, in the order in which ranks queue them.

    An all-reduce runs on level 0 twice: the next chunk's first stage goes before a chunk's last,
    so that level 0 is busy while level 1 sums.
    """
    kinds = _STAGES[op]
    order = sorted(
        ((chunk, number) for chunk in range(num_chunks) for number in range(len(kinds))),
        key=lambda stage: (stage[0] + stage[1] // 2, -stage[0], stage[1]),
    )
    index_of = {stage: index for index, stage in enumerate(order)}
    return tuple(
        PipelineStage(
            level=kinds[number][0],
            op=kinds[number][1],
            chunk=chunk,
            after=index_of.get((chunk, number - 1)),
            is_last=number == len(kinds) - 1,
        )
        for chunk, number in order
    )


def chunk_ranges(numel: int, num_chunks: int) -> list[tuple[int, int]]:
    """Cut a shard into at most `num_chunks` aligned chunks; return (start, stop) of each."""
    units = numel // ALIGN
    num_chunks = min(num_chunks, max(1, units))
    starts = [units * chunk // num_chunks * ALIGN for chunk in range(num_chunks)]
    return list(zip(starts, [*starts[1:], numel], strict=True))


def scratch_shards(span: AxisSpan) -> list[int]:
    """Return how many shards of a chunk each scratch buffer of a span has: the slots, and one more.

    A slot has the shards that go between groups; the last buffer, for a job inside them, has all.
    """
    inside, between = (prod(axis.size for axis in level) for level in ring_levels("ho-ring", span))
    return [*[between] * SLOTS, inside * between]


def default_num_chunks(num_bytes: int) -> int:
    """Return the number of chunks of a buffer where the speed of links is unknown."""
    return max(1, min(_DEFAULT_CHUNKS, num_bytes // _LEAST_BYTES))
