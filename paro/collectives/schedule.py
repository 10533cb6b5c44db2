"""Schedules: a collective of one rank as a list of sends and receives with dependencies."""

# In NCCL's rings the order of sends is fixed in code; here it is data. An axis span is split into
# levels, innermost first, each with rings of its own: `sizes` is (m,) for one ring, (m, g) for g
# groups of m ranks. The position of a rank along the span is inner digit + m * outer digit. The
# buffer is split into one shard per position, and every shard into chunks.
#
# An algorithm (hops.py) lists the hops of its all-gather for one rank: in every hop the rank sends
# chunks to the next position of a level's ring and receives chunks from the previous position.
# `make_schedule` derives the rest from that list:
#
#     reduce-scatter   the hops in reverse: chunks that were sent are received and added
#     all-reduce       the reduce-scatter, then the all-gather
#     after            the earlier steps whose chunk must have arrived, from the data dependencies
#
# The order of steps respects every dependency and is equal on all ranks, so executing them one by
# one never deadlocks; steps of different levels may run at once (scheduled.py).

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

# "native" and "flat" call the backend's collectives; the others are the algorithms of hops.py.
COLLECTIVES = ("native", "flat", "ring", "h-ring", "ho-ring")
# Without ring and h-ring: NCCL takes longer to launch their point-to-point messages than to send
# them. Under NCCL ho-ring is a pipeline of the backend's own collectives.
NCCL_COLLECTIVES = ("native", "flat", "ho-ring")

# Number of messages of a level in flight: one is on the link while the next is prepared. As many
# receives are posted ahead, and a reduction needs scratch memory for as many messages.
MESSAGES_UNDER_WAY = 3

# A message should be large enough to amortize its fixed cost, and small enough that little work
# remains after the last one has arrived.
_CHUNK_BYTES = 768 << 10
_LEAST_CHUNK_BYTES = 256 << 10


class Op(Enum):
    """The collectives that have schedules."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"


class ShardChunk(NamedTuple):
    """Chunk `number` of the shard of position `owner`."""

    owner: int
    number: int


Chunks = tuple[ShardChunk, ...]  # contiguous in the buffer, sent as one message


class Hop(NamedTuple):
    """Step of an all-gather: send to the next, receive from the previous rank of a level's ring."""

    level: int
    sent: Chunks
    received: Chunks
    phase: int = 0  # number of the phase; it starts once all of the previous phase has arrived


class ScheduleMessage(NamedTuple):
    """Chunks that are sent to a peer or received from it, once the steps `after` have arrived."""

    chunks: Chunks
    peer: int
    after: tuple[int, ...]
    adds: bool = False  # whether a received message is added to its chunks or overwrites them


class ScheduleStep(NamedTuple):
    """A paired send and receive of one level."""

    level: int
    send: ScheduleMessage
    receive: ScheduleMessage


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of one rank, with the indices of dependent steps and of the steps per level."""

    steps: tuple[ScheduleStep, ...]
    followers: tuple[tuple[int, ...], ...]  # per step: the steps that send only after it
    of_level: tuple[tuple[int, ...], ...]


Hops = Callable[[Sequence[int], int, int], list[Hop]]  # (sizes, position, chunks)


def neighbour(sizes: Sequence[int], position: int, level: int, offset: int) -> int:
    """Return the position `offset` further along the ring of `level`; `offset` may be negative."""
    below = prod(sizes[:level])
    digit = position // below % sizes[level]
    return position + ((digit + offset) % sizes[level] - digit) * below


@lru_cache(maxsize=1024)
def make_schedule(
    op: Op, hops: Hops, sizes: tuple[int, ...], position: int, num_chunks: int
) -> Schedule:
    """Return the steps of `op` for one position; `hops` is an algorithm's function in hops.py.

    The schedule fixes the order of sums, so results are bitwise reproducible.
    """
    forward = hops(sizes, position, num_chunks)
    draft: list[tuple[Hop, bool]] = []  # (hop, whether the hop runs backwards)
    if op in (Op.REDUCE_SCATTER, Op.ALL_REDUCE):
        draft += [(hop, True) for hop in reversed(forward)]
    if op in (Op.ALL_GATHER, Op.ALL_REDUCE):
        draft += [(hop, False) for hop in forward]
    has_phases = len({hop.phase for hop in forward}) > 1
    steps: list[ScheduleStep] = []
    followers: list[list[int]] = [[] for _ in draft]
    of_level: list[list[int]] = [[] for _ in sizes]
    arrived: dict[ShardChunk, int] = {}  # the last step so far that changed a chunk on this rank
    barrier: int | None = None  # the last step of the previous phase
    for index, (hop, backwards) in enumerate(draft):
        if index and (hop.phase, backwards) != (draft[index - 1][0].phase, draft[index - 1][1]):
            barrier = index - 1 if has_phases else None
        sent, received = (hop.received, hop.sent) if backwards else (hop.sent, hop.received)
        earlier = of_level[hop.level]
        lead = earlier[-MESSAGES_UNDER_WAY] if len(earlier) >= MESSAGES_UNDER_WAY else None
        send = ScheduleMessage(
            chunks=sent,
            peer=neighbour(sizes, position, hop.level, -1 if backwards else 1),
            after=_distinct(*map(arrived.get, sent), lead, barrier),
        )
        receive = ScheduleMessage(
            chunks=received,
            peer=neighbour(sizes, position, hop.level, 1 if backwards else -1),
            after=_distinct(*map(arrived.get, received)) if backwards else (),
            adds=backwards,
        )
        steps.append(ScheduleStep(level=hop.level, send=send, receive=receive))
        arrived |= dict.fromkeys(received, index)
        earlier.append(index)
        for before in send.after:
            followers[before].append(index)
    return Schedule(tuple(steps), tuple(map(tuple, followers)), tuple(map(tuple, of_level)))


def _distinct(*steps: int | None) -> tuple[int, ...]:
    return tuple(sorted({step for step in steps if step is not None}))


def count_chunks(shard_bytes: int) -> int:
    """Return the number of chunks of a shard; at least two unless chunks would be too small."""
    if shard_bytes < 2 * _LEAST_CHUNK_BYTES:
        return 1
    return max(2, -(-shard_bytes // _CHUNK_BYTES))


def cut(start: int, stop: int, num_chunks: int) -> list[tuple[int, int]]:
    """Return (start, stop) of the chunks of a range; the last two are short.

    They have 1/2 and 1/4 of the others' length: the hops of a gather's last chunk, and of a
    reduce-scatter's first chunk (which is the same chunk), overlap with nothing.
    """
    weights = [4] * (num_chunks - 2) + [2, 1] if num_chunks > 1 else [1]
    ends = [(stop - start) * part // sum(weights) for part in accumulate(weights, initial=0)]
    return [(start + low, start + high) for low, high in pairwise(ends)]
