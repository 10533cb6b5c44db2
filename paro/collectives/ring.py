"""Ring: one ring over all ranks; slow inter-group links carry as much as fast ones."""

# All-gather of 2 groups of 3, shards a..f at positions 0..5, | between groups. Each row shows what
# a position has just received from the previous one.
#
#     position 0    1    2  |  3    4    5
#     own      a    b    c  |  d    e    f
#     step 1   f    a    b  |  c    d    e
#     step 2   e    f    a  |  b    c    d
#     step 3   d    e    f  |  a    b    c
#     step 4   c    d    e  |  f    a    b
#     step 5   b    c    d  |  e    f    a
#
# N ranks, a buffer of V bytes split into shards of V / N (all-reduce: twice the steps and bytes):
#
#     level       steps     bytes sent by a rank     links used
#     the ring    N - 1     (N - 1) / N * V          intra: 0-1, 1-2, 3-4, 4-5; inter: 2-3, 5-0
#
# Only the last rank of a group sends to the next group; every step waits for the slowest link.

from __future__ import annotations

from collections.abc import Sequence

from paro.collectives.schedule import Chunk, Hop


def hops(sizes: Sequence[int], place: int, pieces: int) -> list[Hop]:
    """Return the hops of the rank at position `place` in an all-gather on a ring of `sizes[0]`
    ranks."""
    (size,) = sizes
    return [
        Hop(
            level=0,
            sent=(Chunk((place - step) % size, piece),),
            received=(Chunk((place - step - 1) % size, piece),),
        )
        for step in range(size - 1)
        for piece in range(pieces)
    ]
