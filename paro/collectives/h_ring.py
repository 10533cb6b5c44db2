"""H-Ring: a hierarchical ring; inter-group rings run first, then a ring inside every group."""

# All-gather of 2 groups of 3, shards a..f at positions 0..5, | between groups. Each row shows what
# a position has just received.
#
#     position         0    1    2  |  3    4    5
#     own              a    b    c  |  d    e    f
#     outer, step 1    d    e    f  |  a    b    c       rings {0 3} {1 4} {2 5}, all at once
#     inner, step 1    cf   ad   be |  cf   ad   be      rings {0 1 2} {3 4 5}
#     inner, step 2    be   cf   ad |  be   cf   ad
#
# g groups of m ranks, a buffer of V bytes split into shards of V / (m g) (all-reduce: twice the
# steps and bytes):
#
#     level    steps     bytes sent by a rank        links used
#     outer    g - 1     (g - 1) / (m g) * V         inter only, idle while the inner rings run
#     inner    m - 1     (m - 1) / m * V             intra only, idle while the outer rings run
#
# A reduce-scatter runs backwards: inner rings first. A span with one kind of links is one ring.

from __future__ import annotations

from collections.abc import Sequence

from paro.collectives import ring
from paro.collectives.schedule import Chunk, Chunks, Hop


def hops(sizes: Sequence[int], place: int, pieces: int) -> list[Hop]:
    """Return the hops of the rank at `place` in an all-gather over `sizes[1]` groups
    of `sizes[0]`."""
    if len(sizes) == 1:
        return ring.hops(sizes, place, pieces)
    inner_size, outer_size = sizes
    outer, inner = divmod(place, inner_size)

    def chunks(inner_digit: int, outer_digits: Sequence[int], piece: int) -> Chunks:
        first = inner_digit % inner_size
        return tuple(Chunk(first + inner_size * (o % outer_size), piece) for o in outer_digits)

    # Shards with the same inner digit are contiguous: the inner ring sends whole ones together.
    rows = [tuple(range(outer_size))] if pieces == 1 else [(row,) for row in range(outer_size)]
    between = [
        Hop(1, chunks(inner, [outer - step], piece), chunks(inner, [outer - step - 1], piece))
        for step in range(outer_size - 1)
        for piece in range(pieces)
    ]
    inside = [
        Hop(0, chunks(inner - step, row, piece), chunks(inner - step - 1, row, piece), phase=1)
        for step in range(inner_size - 1)
        for row in rows
        for piece in range(pieces)
    ]
    return between + inside
