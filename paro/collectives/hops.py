"""Ring, H-Ring and HO-Ring: the hops of one rank in an all-gather."""

# Diagrams show 2 groups of 3 ranks, shards a..f at positions 0..5, and | between groups; a row has
# the shard that each position has just received. Costs are for g groups of m ranks (Ring: N ranks)
# and a buffer of V bytes, one shard per rank; an all-reduce takes twice the steps and bytes.

from __future__ import annotations

from collections.abc import Sequence

from paro.collectives.schedule import Chunks, Hop, Hops, ShardChunk

# Ring: slow inter-group links carry as many bytes as fast ones.
#
#     position 0    1    2  |  3    4    5
#     own      a    b    c  |  d    e    f
#     step 1   f    a    b  |  c    d    e
#     step 2   e    f    a  |  b    c    d
#     step 3   d    e    f  |  a    b    c
#     step 4   c    d    e  |  f    a    b
#     step 5   b    c    d  |  e    f    a
#
#     level       steps     bytes sent by a rank     links used
#     the ring    N - 1     (N - 1) / N * V          intra: 0-1, 1-2, 3-4, 4-5; inter: 2-3, 5-0
#
# Only the last rank of a group sends to the next group; every step waits for the slowest link.


def ring_hops(sizes: Sequence[int], position: int, num_chunks: int) -> list[Hop]:
    """List the hops of the rank at `position` of one ring of `sizes[0]` ranks."""
    (size,) = sizes
    return [
        Hop(
            level=0,
            sent=(ShardChunk((position - step) % size, number),),
            received=(ShardChunk((position - step - 1) % size, number),),
        )
        for step in range(size - 1)
        for number in range(num_chunks)
    ]


# H-Ring, a hierarchical ring: inter-group rings run first, then a ring inside every group.
#
#     position         0    1    2  |  3    4    5
#     own              a    b    c  |  d    e    f
#     outer, step 1    d    e    f  |  a    b    c       rings {0 3} {1 4} {2 5}, all at once
#     inner, step 1    cf   ad   be |  cf   ad   be      rings {0 1 2} {3 4 5}
#     inner, step 2    be   cf   ad |  be   cf   ad
#
#     level    steps     bytes sent by a rank        links used
#     outer    g - 1     (g - 1) / (m g) * V         inter only, idle while the inner rings run
#     inner    m - 1     (m - 1) / m * V             intra only, idle while the outer rings run
#
# A reduce-scatter runs backwards: inner rings first. A span with one kind of links is one ring.


def h_ring_hops(sizes: Sequence[int], position: int, num_chunks: int) -> list[Hop]:
    """List the hops of the rank at `position` of `sizes[1]` groups of `sizes[0]` ranks."""
    if len(sizes) == 1:
        return ring_hops(sizes, position, num_chunks)
    inner_size, outer_size = sizes
    outer, inner = divmod(position, inner_size)

    def chunks(inner_digit: int, outer_digits: Sequence[int], number: int) -> Chunks:
        first = inner_digit % inner_size
        return tuple(
            ShardChunk(first + inner_size * (o % outer_size), number) for o in outer_digits
        )

    # Shards with equal inner digits are contiguous: uncut, the inner ring sends them together.
    rows = [tuple(range(outer_size))] if num_chunks == 1 else [(row,) for row in range(outer_size)]
    between = [
        Hop(1, chunks(inner, [outer - step], number), chunks(inner, [outer - step - 1], number))
        for step in range(outer_size - 1)
        for number in range(num_chunks)
    ]
    inside = [
        Hop(0, chunks(inner - step, row, number), chunks(inner - step - 1, row, number), phase=1)
        for step in range(inner_size - 1)
        for row in rows
        for number in range(num_chunks)
    ]
    return between + inside


# HO-Ring, a hierarchical overlapping ring: outer and inner rings of one turn run at the same time.
#
#     position             0    1    2  |  3    4    5
#     own                  a    b    c  |  d    e    f
#     turn 1  outer        d    e    f  |  a    b    c       rings {0 3} {1 4} {2 5}
#             inner        c    a    b  |  f    d    e       rings {0 1 2} {3 4 5}: its own row
#                          b    c    a  |  e    f    d
#     turn 2  inner        f    d    e  |  c    a    b       the row of the other group
#                          e    f    d  |  b    c    a
#
#     level    turns          steps of a shard    bytes sent by a rank     links used
#     outer    1 .. g - 1     g - 1               (g - 1) / (m g) * V      inter only
#     inner    1 .. g         g (m - 1)           (m - 1) / m * V          intra only
#
# The inner ring forwards a chunk as soon as the chunk arrives from the other group. After the last
# chunk only m - 1 inner hops remain: T = max(outer, inner) + (m - 1) inner hops of one chunk.
# A reduce-scatter runs backwards: the chunk that is sent first is summed in the group first.


def ho_ring_hops(sizes: Sequence[int], position: int, num_chunks: int) -> list[Hop]:
    """List the hops of the rank at `position` of `sizes[1]` groups of `sizes[0]` ranks."""
    if len(sizes) == 1:
        return ring_hops(sizes, position, num_chunks)
    inner_size, outer_size = sizes
    outer, inner = divmod(position, inner_size)

    def chunk(inner_digit: int, outer_digit: int, number: int) -> Chunks:
        owner = inner_digit % inner_size + inner_size * (outer_digit % outer_size)
        return (ShardChunk(owner, number),)

    def outer_hops(turn: int) -> list[Hop]:
        row = outer - turn
        numbers = range(num_chunks if turn < outer_size - 1 else 0)
        return [Hop(1, chunk(inner, row, n), chunk(inner, row - 1, n)) for n in numbers]

    def inner_hops(turn: int, number: int) -> list[Hop]:
        row = outer - turn
        return [
            Hop(0, chunk(inner - step, row, number), chunk(inner - step - 1, row, number))
            for step in range(inner_size - 1)
        ]

    # The group's own row needs no outer hop: its inner hops fill the time until the next row's
    # chunks arrive. In a reduce-scatter, own sums are needed one by one, as the others' arrive.
    hops = [*outer_hops(0), *outer_hops(1), *inner_hops(0, 0)]
    for number in range(num_chunks):
        hops += inner_hops(0, number + 1) if number + 1 < num_chunks else []
        hops += inner_hops(1, number) if outer_size > 1 else []
    for turn in range(2, outer_size):
        hops += outer_hops(turn)
        for number in range(num_chunks):
            hops += inner_hops(turn, number)
    return hops


ALGORITHMS: dict[str, Hops] = {"ring": ring_hops, "h-ring": h_ring_hops, "ho-ring": ho_ring_hops}
