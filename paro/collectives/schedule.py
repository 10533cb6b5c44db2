"""Who sends which chunk to whom, over which level and after what: a collective as data."""

# A run of axes is seen as levels, innermost first: `sizes` (m,) for a plain ring, (m, g) for g
# groups of m. A rank's place is its number along the run, place = inner digit + m * outer digit.
# The buffer is cut into a shard per place and every shard into pieces; a chunk is one piece.
#
# An algorithm (ring.py, h_ring.py, ho_ring.py) lists the hops of its all-gather for one rank: at
# every hop the rank passes chunks on to the next place of a level's ring and gets others from the
# place before. All else follows from that list:
#
#     reduce-scatter   the hops backwards in time: what was passed on comes back and is added
#     all-reduce       the reduce-scatter, then the all-gather
#     after            the earlier steps whose chunk must have arrived, found by following the data
#
# Steps are in an order that respects every dependency and is the same on all places, so carrying
# them out one by one never blocks; steps of different levels may run at the same time.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

COLLECTIVES = ("native", "flat", "ring", "h-ring", "ho-ring")  # the first two are the backend's

# How many messages of a level may be under way: one is on the link while the next gets ready. So
# many receives are posted ahead, and so much room a reduction needs beside its buffer.
MESSAGES_UNDER_WAY = 3

# A message should be long enough to outweigh its cost, and short enough that little is left to do
# when the last one has come across.
_PIECE_BYTES = 768 << 10
_LEAST_PIECE_BYTES = 256 << 10


class Op(Enum):
    """The collectives that have schedules."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"


class Chunk(NamedTuple):
    """One piece of the shard of one place."""

    owner: int
    piece: int


Chunks = tuple[Chunk, ...]  # neighbours in the buffer, which travel as one message


class Hop(NamedTuple):
    """One step of an all-gather: `sent` goes to the next place of a level, `received` comes in."""

    level: int
    sent: Chunks
    received: Chunks
    phase: int = 0  # nothing is sent before all of the phase before has arrived


class Send(NamedTuple):
    """A message leaves once those of the steps `after` have arrived."""

    chunks: Chunks
    peer: int
    after: tuple[int, ...]


class Receive(NamedTuple):
    """What comes in replaces what was there, or is added to it, behind the steps `after`."""

    chunks: Chunks
    peer: int
    adds: bool
    after: tuple[int, ...]


class Step(NamedTuple):
    """A send and a receive of one level that belong together."""

    level: int
    send: Send
    receive: Receive


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of one place, and the same by what depends on them and by level."""

    steps: tuple[Step, ...]
    followers: tuple[tuple[int, ...], ...]  # of every step: those that send only after it
    of_level: tuple[tuple[int, ...], ...]


Hops = Callable[[Sequence[int], int, int], list[Hop]]  # (sizes, place, pieces)


def neighbour(sizes: Sequence[int], place: int, level: int, offset: int) -> int:
    """The place `offset` further along the ring of `level`; negative: before."""
    below = prod(sizes[:level])
    digit = place // below % sizes[level]
    return place + ((digit + offset) % sizes[level] - digit) * below


@lru_cache(maxsize=1024)
def make_schedule(op: Op, hops: Hops, sizes: tuple[int, ...], place: int, pieces: int) -> Schedule:
    """The steps of `op` for one place; `hops` is that of an algorithm's file.

    The order of sums is fixed by the schedule, so results are the same bits at every run.
    """
    forward = hops(sizes, place, pieces)
    draft: list[tuple[Hop, bool]] = []  # a hop, and whether it runs backwards
    if op in (Op.REDUCE_SCATTER, Op.ALL_REDUCE):
        draft += [(hop, True) for hop in reversed(forward)]
    if op in (Op.ALL_GATHER, Op.ALL_REDUCE):
        draft += [(hop, False) for hop in forward]
    steps = _linked(draft, sizes, place)
    followers: list[list[int]] = [[] for _ in steps]
    of_level: list[list[int]] = [[] for _ in sizes]
    for index, step in enumerate(steps):
        of_level[step.level].append(index)
        for before in step.send.after:
            followers[before].append(index)
    return Schedule(steps, tuple(map(tuple, followers)), tuple(map(tuple, of_level)))


def _linked(
    draft: Sequence[tuple[Hop, bool]], sizes: Sequence[int], place: int
) -> tuple[Step, ...]:
    """Finds for every step what it has to wait for."""
    steps: list[Step] = []
    arrived: dict[Chunk, int] = {}  # the last step so far that changed the chunk here
    of_level: dict[int, list[int]] = {}
    barrier: int | None = None  # the last step of the phase before
    for index, (hop, backwards) in enumerate(draft):
        if index and (hop.phase, backwards) != (draft[index - 1][0].phase, draft[index - 1][1]):
            barrier = index - 1 if _in_phases(draft) else None
        sent, received = (hop.received, hop.sent) if backwards else (hop.sent, hop.received)
        mine = of_level.setdefault(hop.level, [])
        lead = mine[-MESSAGES_UNDER_WAY] if len(mine) >= MESSAGES_UNDER_WAY else None
        send = Send(
            chunks=sent,
            peer=neighbour(sizes, place, hop.level, -1 if backwards else 1),
            after=_distinct(*map(arrived.get, sent), lead, barrier),
        )
        receive = Receive(
            chunks=received,
            peer=neighbour(sizes, place, hop.level, 1 if backwards else -1),
            adds=backwards,
            after=_distinct(*map(arrived.get, received)) if backwards else (),
        )
        steps.append(Step(level=hop.level, send=send, receive=receive))
        arrived |= dict.fromkeys(received, index)
        mine.append(index)
    return tuple(steps)


def _in_phases(draft: Sequence[tuple[Hop, bool]]) -> bool:
    return any(one.phase != other.phase for (one, _), (other, _) in pairwise(draft))


def _distinct(*steps: int | None) -> tuple[int, ...]:
    return tuple(sorted({step for step in steps if step is not None}))


def count_pieces(shard_bytes: int) -> int:
    """Into how many pieces a shard is cut; two at least, where that is worth a message."""
    if shard_bytes < 2 * _LEAST_PIECE_BYTES:
        return 1
    return max(2, -(-shard_bytes // _PIECE_BYTES))


def cut(start: int, stop: int, pieces: int) -> list[tuple[int, int]]:
    """(start, stop) of every piece of a range; the last two are a half and a quarter of the others.

    Nothing is left to hide the hops of the last piece of a gather behind, nor those of the first of
    a reduce-scatter, which goes backwards: they should be short.
    """
    weights = [4] * (pieces - 2) + [2, 1] if pieces > 1 else [1]
    ends = [(stop - start) * part // sum(weights) for part in accumulate(weights, initial=0)]
    return [(start + low, start + high) for low, high in pairwise(ends)]
