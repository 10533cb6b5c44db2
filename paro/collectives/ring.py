"""Ring: one ring through all places; every link carries everything, the slow ones too."""

# All-gather of 2 groups of 3, the shards a..f at places 0..5, | between groups. Each row shows what
# a place has just received from the place before it.
#
#     place    0    1    2  |  3    4    5
#     own      a    b    c  |  d    e    f
#     step 1   f    a    b  |  c    d    e
#     step 2   e    f    a  |  b    c    d
#     step 3   d    e    f  |  a    b    c
#     step 4   c    d    e  |  f    a    b
#     step 5   b    c    d  |  e    f    a
#
# With N places and a buffer of V bytes, cut into shards of V / N (all-reduce: twice of all):
#
#     level       steps     bytes sent by a place    links used
#     the ring    N - 1     (N - 1) / N * V          intra: 0-1, 1-2, 3-4, 4-5; inter: 2-3, 5-0
#
# Only the last place of a group sends to the next group, and no step ends before its slowest link.

from __future__ import annotations

from collections.abc import Sequence

from paro.collectives.schedule import Chunk, Hop


def hops(sizes: Sequence[int], place: int, pieces: int) -> list[Hop]:
    """The all-gather of `place` in a ring of `sizes[0]` places."""
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
