"""HO-Ring: the rings of H-Ring, turning at the same time: what crosses groups spreads at once."""

# All-gather of 2 groups of 3, the shards a..f at places 0..5, | between groups. Each row shows what
# a place has just received; outer and inner rings of one row turn at the same time.
#
#     place                0    1    2  |  3    4    5
#     own                  a    b    c  |  d    e    f
#     turn 1  outer        d    e    f  |  a    b    c       rings {0 3} {1 4} {2 5}
#             inner        c    a    b  |  f    d    e       rings {0 1 2} {3 4 5}: the own row
#                          b    c    a  |  e    f    d
#     turn 2  inner        f    d    e  |  c    a    b       the row that came across
#                          e    f    d  |  b    c    a
#
# With groups of m, g of them, and a buffer of V bytes, cut into shards of V / (m g) and those into
# pieces (all-reduce: twice of all):
#
#     level    turns          steps of a shard    bytes sent by a place    links used
#     outer    1 .. g - 1     g - 1               (g - 1) / (m g) * V      inter alone
#     inner    1 .. g         g (m - 1)           (m - 1) / m * V          intra alone
#
# The inner ring takes a piece round as soon as it has come across, so after the last one arrives
# only the m - 1 hops of a single piece are left: T = max(outer, inner) + one piece inside.
# A reduce-scatter runs backwards: the piece that leaves first is summed inside first.

from __future__ import annotations

from collections.abc import Sequence

from paro.collectives import ring
from paro.collectives.schedule import Chunk, Chunks, Hop


def hops(sizes: Sequence[int], place: int, pieces: int) -> list[Hop]:
    """The all-gather of `place` in `sizes[1]` groups of `sizes[0]` places."""
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

    # The own row, which is at hand, fills the time in which the pieces of the next one come in. In
    # a reduce-scatter its sums are wanted one by one, as the other group's come in to be added.
    found = [*outer_hops(0), *outer_hops(1), *inner_hops(0, 0)]
    for piece in range(pieces):
        found += inner_hops(0, piece + 1) if piece + 1 < pieces else []
        found += inner_hops(1, piece) if outer_size > 1 else []
    for turn in range(2, outer_size):
        found += outer_hops(turn)
        for piece in range(pieces):
            found += inner_hops(turn, piece)
    return found
