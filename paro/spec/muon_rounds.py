"""Assigns Muon's matrices to owner ranks in rounds, and units to the buckets that groups update."""

# [Note: Muon's rounds]
# Newton-Schulz needs a whole matrix, but optimizer state is sharded in flat buffers, where a matrix
# may cross shards (as in Megatron's distributed optimizer). A shard group is the ranks over which
# one copy of the optimizer state is sharded (the shard dim of HSDP). Each matrix has an owner rank
# there, which computes the update of the whole matrix. A round has at most one matrix per rank:
#
#     all-to-all       every rank sends its shards of the round's momentum to the owner ranks
#     Newton-Schulz    every owner rank has one whole matrix
#     all-to-all       every owner rank sends back the shards of the update
#
# A round takes as long as its largest matrix, so matrices of equal cost share rounds. Matrices that
# fill no round with their equals are assigned in decreasing order of cost. All ranks compute the
# same assignment, without communication. A shard group of 4 ranks, and blocks 0 and 1 with the
# matrices Q O (square) and U D (up, down); the others are left out:
#
#     round    rank 0    rank 1    rank 2    rank 3
#     0        0.Q       0.O       1.Q       1.O
#     1        0.U       0.D       1.U       1.D
#
# Where optimizer state is replicated on all ranks, the ranks of a group (fast links, such as a
# node) act as the shard group. Each has the whole momentum, so a round has only the second
# all-to-all, in which an owner rank sends whole updates to every other rank.

# [Note: buckets]
# If optimizer state is sharded over o ranks in several groups, the all-to-alls would cross groups.
# Buckets shard each unit over only s ranks, the largest of the group size and the sharding degrees
# of parameters and gradients: o/s consecutive units with equal layouts form a bucket, whose buffer
# has one unit after another. The optimizer shards of units 0 and 1, each with parts a, b, c, d, on
# o = 4 ranks with s = 2:
#
#                     rank 0     rank 1     rank 2     rank 3
#     separately      0.a 1.a    0.b 1.b    0.c 1.c    0.d 1.d     a rank: a part of each unit
#     in a bucket     0.a 0.b    0.c 0.d    1.a 1.b    1.c 1.d     a group of 2: a whole unit
#
# So a group updates whole units, and its all-to-alls stay inside the group. Once a step a bucket
# has one reduce-scatter of gradients and one all-gather of updated parameters, with as many bytes
# as those of its units separately. Units that fill no bucket stay sharded over o ranks, as do their
# all-to-alls.

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain

from paro.layout import ChunkRange, Unit, UnitLayout
from paro.spec.sharding_spec import ShardingSpec
from paro.spec.states import is_for_muon
from paro.topology import AxisSpan, Topology


@dataclass(frozen=True, slots=True)
class MuonMatrix:
    """A matrix that Muon updates, and its position in the flat buffer of its unit."""

    buffer: int  # the number of the flat buffer
    buffer_numel: int
    start: int  # offset in the buffer, in elements
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def short_side(self) -> int:
        return min(self.rows, self.columns)

    def newton_schulz_flops(self, steps: int) -> int:
        """Count FLOPs of `steps` steps of Newton-Schulz."""
        return steps * (4 * self.short_side * self.numel + 2 * self.short_side**3)


MuonRound = Mapping[int, MuonMatrix]  # the matrices of a round, each by its owner rank


@dataclass(frozen=True)
class MuonRounds:
    """The rounds of all-to-alls and Newton-Schulz of a shard group, whose ranks count from 0."""

    num_ranks: int
    degree: int  # number of ranks over which a matrix is sharded: `num_ranks`, or 1
    rounds: tuple[MuonRound, ...]

    @property
    def is_sharded(self) -> bool:
        return self.degree > 1

    def span(self, topology: Topology) -> AxisSpan:
        """Return the axes along which the ranks of the shard group differ."""
        return topology.axes_between(1, self.num_ranks)

    def shards(self, matrix: MuonMatrix) -> Iterator[tuple[int, int, int]]:
        """Yield (rank, low, high) for every rank that holds elements [low, high) of a matrix."""
        if not self.is_sharded:
            yield from ((rank, 0, matrix.numel) for rank in range(self.num_ranks))
            return
        size = matrix.buffer_numel // self.degree
        stop = matrix.start + matrix.numel
        for rank in range(matrix.start // size, (stop - 1) // size + 1):
            low, high = max(matrix.start, rank * size), min(stop, (rank + 1) * size)
            yield rank, low - matrix.start, high - matrix.start

    @cached_property
    def sent_numels(self) -> Counter[tuple[int, int]]:
        """The elements that a step sends, by the ranks of sender and receiver."""
        sent: Counter[tuple[int, int]] = Counter()
        for owner, matrix in chain.from_iterable(each.items() for each in self.rounds):
            for rank, low, high in self.shards(matrix):
                if rank != owner:
                    sent[owner, rank] += high - low
                    if self.is_sharded:
                        sent[rank, owner] += high - low
        return sent

    def newton_schulz_flops(self, steps: int) -> tuple[int, int]:
        """Count FLOPs of each round's busiest rank, summed over rounds, and FLOPs of all ranks."""
        rounds = (each.values() for each in self.rounds)
        flops = [[matrix.newton_schulz_flops(steps) for matrix in each] for each in rounds]
        return sum(map(max, flops)), sum(map(sum, flops))

    def peak_bytes(self, wire_bytes: int) -> int:
        """Count bytes that the busiest rank allocates at most, with fp32 products."""
        return max(wire_bytes * moved + 4 * computed for moved, computed in self._allocated)

    @cached_property
    def _allocated(self) -> list[tuple[int, int]]:
        """Elements allocated in every round: (sent or received, made by Newton-Schulz).

        While a rank computes a round, the shards and the matrix of the next one arrive, and the
        update of the one before is sent.
        """
        matrices = [[*each.values()] for each in self.rounds]
        whole = [max(matrix.numel for matrix in each) for each in matrices]
        short = [max(matrix.short_side for matrix in each) for each in matrices]
        update = [self._most_elements(each) for each in matrices]
        momentum = update if self.is_sharded else [0] * len(matrices)
        allocated = []
        for index in range(len(matrices)):
            moved = 2 * whole[index]  # the matrix as received, and its update
            for other, shards in ((index - 1, update), (index + 1, momentum)):
                if 0 <= other < len(matrices):
                    moved += whole[other] + shards[other]
            allocated.append((moved, 3 * whole[index] + 2 * short[index] ** 2))
        return allocated

    def _most_elements(self, matrices: Iterable[MuonMatrix]) -> int:
        """Count the elements of `matrices` on the rank whose shards have most of them."""
        by_rank: Counter[int] = Counter()
        for rank, low, high in chain.from_iterable(map(self.shards, matrices)):
            by_rank[rank] += high - low
        return max(by_rank.values())


def muon_rounds(specs: Sequence[ShardingSpec]) -> list[MuonRounds]:
    """Assign the matrices of all buffers to owner ranks, in each shard group that a rank is in.

    A bucket counts as its first unit: every group updates one of its units, in equal rounds.
    """
    if not specs or specs[0].precision.optimizer != "muon":
        return []  # at once: a search asks this of every candidate
    matrices: defaultdict[tuple[int, int], list[MuonMatrix]] = defaultdict(list)
    for number, spec in enumerate(specs):
        if spec.muon_stop and spec.unit.bucket_size:
            degree = spec.optim_degree
            num_ranks = degree if degree > 1 else spec.topology.group_size
            matrices[num_ranks, degree].extend(
                MuonMatrix(number, spec.layout.numel, *matrix) for matrix in spec.unit.matrices
            )
    return [
        assign(tuple(of_group), num_ranks, degree)
        for (num_ranks, degree), of_group in matrices.items()
    ]


@lru_cache(maxsize=64)
def assign(matrices: tuple[MuonMatrix, ...], num_ranks: int, degree: int) -> MuonRounds:
    """Assign matrices, in forward order, to rounds and to owner ranks of a shard group."""
    waiting: defaultdict[tuple[int, int], list[MuonMatrix]] = defaultdict(list)
    rounds = []
    for matrix in matrices:
        of_equal_cost = waiting[matrix.short_side, matrix.numel]
        of_equal_cost.append(matrix)
        if len(of_equal_cost) == num_ranks:
            rounds.append(tuple(of_equal_cost))
            of_equal_cost.clear()
    rest = sorted(
        chain.from_iterable(waiting.values()),
        key=lambda matrix: -matrix.numel * matrix.short_side,  # nearly proportional to FLOPs
    )
    rounds += (tuple(rest[low : low + num_ranks]) for low in range(0, len(rest), num_ranks))
    # The owners of a round are spread evenly over ranks, so over nodes.
    assigned = (
        {n * num_ranks // len(each): matrix for n, matrix in enumerate(each)} for each in rounds
    )
    return MuonRounds(num_ranks, degree, tuple(assigned))


def muon_chunks(layout: UnitLayout) -> tuple[ChunkRange, ...]:
    """Return the chunks of a unit that Muon updates."""
    return tuple(at for at in layout.chunks if is_for_muon(at.chunk.name, at.chunk.shape))


def bucket_sizes(kinds: Sequence[Hashable], bucket_size: int) -> list[int]:
    """Return the `Unit.bucket_size` of every unit that trains, from the shapes of the units.

    A bucket has consecutive units of equal kind, but not of kind None. The first units of a kind
    are left over: the next forward waits less for their updates, and the last reduction is short.
    """
    sizes, end = [1] * len(kinds), len(kinds)
    while bucket_size > 1 and end >= bucket_size:
        bucket = slice(end - bucket_size, end)
        if kinds[end - 1] is None or len({*kinds[bucket]}) > 1:
            end -= 1
            continue
        sizes[bucket] = bucket_size, *[0] * (bucket_size - 1)
        end -= bucket_size
    return sizes


def prepare_for_muon(units: Sequence[Unit], bucket_size: int) -> tuple[Unit, ...]:
    """Return the units with the matrices that Muon updates and, each, the size of its bucket."""
    units = [
        replace(
            unit, matrices=tuple((m.offset, *m.chunk.sizes) for m in muon_chunks(unit.trainable))
        )
        for unit in units
    ]
    trained = [unit for unit in units if unit.trainable.numel]
    kinds = [(unit.trainable.numel, unit.matrices) if unit.matrices else None for unit in trained]
    sizes = iter(bucket_sizes(kinds, bucket_size))
    return tuple(
        replace(unit, bucket_size=next(sizes)) if unit.trainable.numel else unit for unit in units
    )
