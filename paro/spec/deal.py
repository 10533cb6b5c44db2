"""Deals units to groups, and their matrices to ranks in rounds, for Muon to update."""

# [Note: places and rounds]
# The ranks that hold an optimizer shard together have places, in the order of their ranges of a
# flat buffer. Newton-Schulz needs a whole matrix, whose elements lie at several places: in a round
# every place gets at most one matrix, its own, from all that hold a part of it, and sends the parts
# of the result back. Matrices of equal cost share a round, so places wait little for one another;
# what is left at the end is dealt by falling cost. All ranks deal alike. Where every rank holds the
# whole optimizer state, the ranks of a group are the places: nothing travels to the owner, and the
# whole result to all others.

# [Note: buckets]
# Where optimizer state is spread over several groups, and parameters and gradients are not spread
# as far, a matrix need not be spread over all these ranks: the size of a group is enough, or the
# degree of parameters or of gradients if that is larger. The degree of the optimizer state, divided
# by this one, is the number of consecutive units with equal layouts that form a bucket. Its buffers
# have one unit after another. The step reduce-scatter of the bucket, and the all-gather of updated
# parameters, are even and send what those of its units would. But an optimizer range of the bucket
# is part of a single unit: a group updates whole units, whose matrices its ranks exchange inside.
# Units that are left over have even ranges, and an exchange over the larger degree.

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from paro.layout import PlacedChunk, UnitLayout
from paro.precision import PrecisionConfig
from paro.spec.sharding_spec import ShardingSpec
from paro.spec.states import is_for_muon
from paro.step.units import Unit
from paro.strategy import Strategy
from paro.topology import AxisSpan, Topology


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of a unit that trains, at [start, stop) of its flat buffer of `unit_numel`."""

    unit: int
    unit_numel: int
    start: int
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def cost(self) -> int:
        """To which the FLOPs of Newton-Schulz are nearly proportional."""
        return self.numel * min(self.rows, self.columns)


@dataclass(frozen=True, slots=True)
class Places:
    """Among how many places matrices are dealt, and over how many of them each is spread.

    `degree` is `number`, or 1: then every place holds whole matrices.
    """

    number: int
    degree: int

    @property
    def spread(self) -> bool:
        return self.degree > 1

    def span(self, topology: Topology) -> AxisSpan:
        """Return the axes along which the places are."""
        return topology.axes_between(1, self.number)

    def parts(self, matrix: Matrix) -> Iterator[tuple[int, int, int]]:
        """Yield the places that hold a part of a matrix, each with the elements [low, high) it
        holds."""
        if not self.spread:
            yield from ((place, 0, matrix.numel) for place in range(self.number))
            return
        size = matrix.unit_numel // self.degree
        stop = matrix.start + matrix.numel
        for place in range(matrix.start // size, (stop - 1) // size + 1):
            low, high = max(matrix.start, place * size), min(stop, (place + 1) * size)
            yield place, low - matrix.start, high - matrix.start


@dataclass(frozen=True, slots=True)
class Dealt:
    """A matrix and the place that gets it whole in a round."""

    matrix: Matrix
    owner: int


Round = tuple[Dealt, ...]  # owners are different places


def muon_chunks(layout: UnitLayout) -> tuple[PlacedChunk, ...]:
    """Return the chunks of a unit that Muon updates."""
    return tuple(one for one in layout.chunks if is_for_muon(one.chunk.name, one.chunk.shape))


def muon_places(layout: UnitLayout) -> tuple[tuple[int, int, int], ...]:
    """Return the offset, rows and columns of these."""
    found = []
    for placed in muon_chunks(layout):
        rows, columns = placed.chunk.sizes
        found.append((placed.offset, rows, columns))
    return tuple(found)


def places_to_deal_to(strategy: Strategy, precision: PrecisionConfig, group_size: int) -> int:
    """How many units form a bucket (Note: buckets), if they are dealt; else 1."""
    may_be = precision.optimizer == "muon" and not precision.has_codes
    degree = max(strategy.params, strategy.grads, group_size)
    return max(1, strategy.optim // degree) if may_be else 1


def first_of_buckets(kinds: Sequence[Hashable], places: int) -> list[int]:
    """For every unit that trains: `places` if a bucket begins with it, 0 in one, 1 outside.

    Units of equal kinds are laid out alike; those of kind None stay outside. The first ones of a
    kind are left over: the next forward waits less for them, and what is reduced last is short.
    """
    found, end = [1] * len(kinds), len(kinds)
    while places > 1 and end >= places:
        bucket = slice(end - places, end)
        if kinds[end - 1] is None or len({*kinds[bucket]}) > 1:
            end -= 1
            continue
        found[bucket] = places, *[0] * (places - 1)
        end -= places
    return found


@lru_cache(maxsize=64)
def deal(matrices: tuple[Matrix, ...], places: int) -> tuple[Round, ...]:
    """Return the rounds, those of matrices that a forward needs first first."""
    rounds: list[Round] = []
    waiting: dict[tuple[int, int], list[Matrix]] = {}
    for matrix in matrices:
        sides = min(matrix.rows, matrix.columns), max(matrix.rows, matrix.columns)
        alike = waiting.setdefault(sides, [])
        alike.append(matrix)
        if len(alike) == places:
            rounds.append(_round(alike, places))
            alike.clear()
    rest = [matrix for alike in waiting.values() for matrix in alike]
    rest.sort(key=lambda matrix: -matrix.cost)  # stable
    for begin in range(0, len(rest), places):
        rounds.append(_round(rest[begin : begin + places], places))
    return tuple(rounds)


def _round(matrices: Sequence[Matrix], places: int) -> Round:
    """Owners are spread evenly over the places, and so over nodes."""
    number = len(matrices)
    return tuple(Dealt(matrix, index * places // number) for index, matrix in enumerate(matrices))


@lru_cache(maxsize=64)
def sent_numels(rounds: tuple[Round, ...], places: Places) -> dict[tuple[int, int], int]:
    """How many elements a place sends to another one in a step, there and back."""
    sent: dict[tuple[int, int], int] = {}
    for owner, matrix in ((each.owner, each.matrix) for one in rounds for each in one):
        for holder, low, high in places.parts(matrix):
            ways = ((holder, owner), (owner, holder)) if places.spread else ((owner, holder),)
            for way in ways if holder != owner else ():
                sent[way] = sent.get(way, 0) + high - low
    return sent


def newton_schulz_flops(rounds: Sequence[Round], steps: int) -> tuple[int, int]:
    """Return FLOPs of the places that take longest in each round, and of all places together."""
    longest = total = 0
    for one in rounds:
        each = [_flops(dealt.matrix, steps) for dealt in one]
        longest += max(each)
        total += sum(each)
    return longest, total


def _flops(matrix: Matrix, steps: int) -> int:
    short = min(matrix.rows, matrix.columns)
    return steps * (4 * short * matrix.numel + 2 * short**3)


@lru_cache(maxsize=64)
def most_bytes(rounds: tuple[Round, ...], places: Places, wire_bytes: int) -> int:
    """What a rank allocates at most for its rounds, whichever place it has, with fp32 products.

    While it computes a round, the parts and the matrix of the next one arrive, and the result of
    the one before is on its way.
    """
    whole = [max(dealt.matrix.numel for dealt in one) for one in rounds]
    back = [_most_held(one, places) for one in rounds]
    there = back if places.spread else [0] * len(rounds)
    short = [max(min(d.matrix.rows, d.matrix.columns) for d in one) for one in rounds]
    peak = 0
    for index in range(len(rounds)):
        moved = 2 * whole[index]  # as it came, and the result
        for other, parts in ((index - 1, back), (index + 1, there)):
            if 0 <= other < len(rounds):
                moved += whole[other] + parts[other]
        computing = 4 * (3 * whole[index] + 2 * short[index] ** 2)
        peak = max(peak, wire_bytes * moved + computing)
    return peak


def _most_held(one: Round, places: Places) -> int:
    """Return the most elements of a round's matrices that a place holds."""
    held: dict[int, int] = {}
    for dealt in one:
        for place, low, high in places.parts(dealt.matrix):
            held[place] = held.get(place, 0) + high - low
    return max(held.values())


def in_buckets(
    units: Sequence[Unit], strategy: Strategy, precision: PrecisionConfig, group_size: int
) -> tuple[Unit, ...]:
    """Return the same units with the buckets in which they are dealt to places."""
    places = places_to_deal_to(strategy, precision, group_size)
    trained = [unit for unit in units if unit.trainable_numel]
    kinds = [(unit.trainable_numel, unit.matrices) if unit.matrices else None for unit in trained]
    dealt = iter(first_of_buckets(kinds, places))
    return tuple(replace(one, dealt=next(dealt)) if one.trainable_numel else one for one in units)


def muon_rounds(specs: Iterable[ShardingSpec]) -> dict[Places, tuple[Round, ...]]:
    """Return a rank's rounds if Muon updates, by the places among which their matrices are dealt.

    Those of a bucket are all groups' alike: of the unit that each has.
    """
    found: dict[Places, list[Matrix]] = {}
    for number, spec in enumerate(specs):
        if spec.muon_stop and spec.unit.dealt:
            degree = spec.optim_degree
            places = Places(degree if degree > 1 else spec.topology.group_size, degree)
            numel = spec.layout.numel
            matrices = [Matrix(number, numel, *place) for place in spec.unit.matrices]
            found.setdefault(places, []).extend(matrices)
    return {places: deal(tuple(matrices), places.number) for places, matrices in found.items()}
