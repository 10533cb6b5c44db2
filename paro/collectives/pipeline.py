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
# Both levels send the bytes of the ring formulas (ho_ring.py). With `num_chunks` chunks the shorter
# level overlaps with the longer one but for one chunk: T = max(outer, inner) + min(outer, inner) /
# chunks, and every stage has its own latency.
#
# Stages hand a chunk on in one of `SLOTS` buffers, which chunks use in turn: a chunk enters the
# pipeline once the one that had its buffer has left it, that of an earlier collective too.

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from paro.collectives.schedule import Op
from paro.layout import ALIGN

MAX_CHUNKS = 8
SLOTS = 2
_DEFAULT_CHUNKS = 4
_LEAST_BYTES = 8 << 20  # of a chunk of the whole buffer

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
    after: int | None  # None: the chunk enters the pipeline
    is_last: bool  # the chunk leaves it


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
    """Cut a shard into at most so many aligned chunks; return (start, stop) of each."""
    units = numel // ALIGN
    num_chunks = min(num_chunks, max(1, units))
    starts = [units * chunk // num_chunks * ALIGN for chunk in range(num_chunks)]
    return list(zip(starts, [*starts[1:], numel], strict=True))


def default_num_chunks(num_bytes: int) -> int:
    """Return the number of chunks of a buffer if the speed of links is unknown."""
    return max(1, min(_DEFAULT_CHUNKS, num_bytes // _LEAST_BYTES))
