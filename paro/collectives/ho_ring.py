"""HO-Ring: a hierarchical ring whose inter-group and intra-group rings run at the same time."""

# All-gather of 2 groups of 3, shards a..f at positions 0..5, | between groups. Each row shows what
# a position has just received; outer and inner rings of one turn run at the same time.
#
#     position             0    1    2  |  3    4    5
#     own                  a    b    c  |  d    e    f
#     turn 1  outer        d    e    f  |  a    b    c       rings {0 3} {1 4} {2 5}
#             inner        c    a    b  |  f    d    e       rings {0 1 2} {3 4 5}: its own row
#                          b    c    a  |  e    f    d
#     turn 2  inner        f    d    e  |  c    a    b       the row of the other group
#                          e    f    d  |  b    c    a
#
# g groups of m ranks, a buffer of V bytes split into shards of V / (m g), and shards into pieces
# (all-reduce: twice the steps and bytes):
#
#     level    turns          steps of a shard    bytes sent by a rank     links used
#     outer    1 .. g - 1     g - 1               (g - 1) / (m g) * V      inter only
#     inner    1 .. g         g (m - 1)           (m - 1) / m * V          intra only
#
# The inner ring forwards a piece as soon as it arrives from the other group, so after the last one
# only the m - 1 inner hops of one piece remain: T = max(outer, inner) + the inner hops of one
# piece. A reduce-scatter runs backwards: the piece that is sent first is summed in the group first.

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

    def chunks(inner_digit: int, outer_digit: int, piece: int) -> Chunks:
        owner = inner_digit % inner_size + inner_size * (outer_digit % outer_size)
        return (Chunk(owner, piece),)

    def outer_hops(turn: int) -> list[Hop]:
        row = outer - turn
        pair = range(pieces if turn < outer_size - 1 else 0)
        return [Hop(1, chunks(inner, row, piece), chunks(inner, row - 1, piece)) for piece in pair]

    def inner_hops(turn: int, piece: int) -> list[Hop]:
        row = outer - turn
        return [
            Hop(0, chunks(inner - step, row, piece), chunks(inner - step - 1, row, piece))
            for step in range(inner_size - 1)
        ]

    # The group's own row needs no outer hop: it fills the time until the pieces of the next row
    # arrive. A reduce-scatter needs its sums one by one, as those of the other group arrive.
    found = [*outer_hops(0), *outer_hops(1), *inner_hops(0, 0)]
    for piece in range(pieces):
        found += inner_hops(0, piece + 1) if piece + 1 < pieces else []
        found += inner_hops(1, piece) if outer_size > 1 else []
    for turn in range(2, outer_size):
        found += outer_hops(turn)
        for piece in range(pieces):
            found += inner_hops(turn, piece)
    return found
