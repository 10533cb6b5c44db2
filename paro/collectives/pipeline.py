"""HO-Ring of the backend's own collectives: few large pieces, inside and between groups at once."""

# For NCCL, where a launch costs more than a small message: a collective over both levels is cut
# into pieces, and each piece goes through the levels one stage after another. Level 1 is between
# groups, level 0 inside them; a stage is one backend collective on the comm stream of its level.
# All-gather of three pieces, time to the right:
#
#     level 1    gather 0   gather 1   gather 2
#     level 0               gather 0   gather 1   gather 2
#
#     collective        stages of a piece
#     all-gather        gather on level 1, gather on level 0
#     reduce-scatter    reduce-scatter on level 0, reduce-scatter on level 1
#     all-reduce        reduce-scatter on level 0, all-reduce on level 1, gather on level 0
#
# Both levels send the bytes of the ring formulas (ho_ring.py). With `pieces` pieces the shorter
# level overlaps with the longer one but for one piece: T = max(outer, inner) + min(outer, inner) /
# pieces, and every stage has its own latency.
#
# Stages hand a piece on in one of `SLOTS` buffers, which pieces use in turn: a piece enters the
# pipeline once the one that had its buffer has left it, that of an earlier collective too.

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from paro.collectives.schedule import Op
from paro.layout import ALIGN

MAX_PIECES = 8
SLOTS = 2
_DEFAULT_PIECES = 4
_LEAST_BYTES = 8 << 20  # of a piece of the whole buffer

_STAGES = {
    Op.ALL_GATHER: ((1, Op.ALL_GATHER), (0, Op.ALL_GATHER)),
    Op.REDUCE_SCATTER: ((0, Op.REDUCE_SCATTER), (1, Op.REDUCE_SCATTER)),
    Op.ALL_REDUCE: ((0, Op.REDUCE_SCATTER), (1, Op.ALL_REDUCE), (0, Op.ALL_GATHER)),
}


class PipelineStage(NamedTuple):
    """A backend collective of one piece on one level, after the stage with the index `after`."""

    level: int
    op: Op
    piece: int
    after: int | None  # None: the piece enters the pipeline
    is_last: bool  # the piece leaves it


@lru_cache(maxsize=64)
def make_pipeline(op: Op, pieces: int) -> tuple[PipelineStage, ...]:
    """Return the stages of a collective over two levels, in the order in which all ranks queue
    them.

    An all-reduce visits level 0 twice: the next piece's first visit goes before a piece's second,
    so that level 0 is busy while level 1 sums.
    """
    kinds = _STAGES[op]
    order = sorted(
        ((piece, number) for piece in range(pieces) for number in range(len(kinds))),
        key=lambda stage: (stage[0] + stage[1] // 2, -stage[0], stage[1]),
    )
    index_of = {stage: index for index, stage in enumerate(order)}
    return tuple(
        PipelineStage(
            level=kinds[number][0],
            op=kinds[number][1],
            piece=piece,
            after=index_of.get((piece, number - 1)),
            is_last=number == len(kinds) - 1,
        )
        for piece, number in order
    )


def piece_ranges(numel: int, pieces: int) -> list[tuple[int, int]]:
    """Cut a shard into at most so many aligned pieces; return (start, stop) of each."""
    units = numel // ALIGN
    pieces = min(pieces, max(1, units))
    starts = [units * piece // pieces * ALIGN for piece in range(pieces)]
    return list(zip(starts, [*starts[1:], numel], strict=True))


def default_pieces(num_bytes: int) -> int:
    """Return the number of pieces of a buffer where no machine file says how fast the links are."""
    return max(1, min(_DEFAULT_PIECES, num_bytes // _LEAST_BYTES))
