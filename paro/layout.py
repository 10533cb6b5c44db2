"""Units and their flat buffers: offsets of parameters, slices, padding and nested shards."""

# [Note: nested shards]
# A unit's flat buffer has `numel` elements: chunks one after the other, then padding, so that every
# degree divides it. A rank's shard at a finer degree is inside its shard at any coarser one
# (Topology.shard_start). So going finer is a reduce-scatter or a local slice, going coarser is an
# all-gather, and data is never permuted. Six ranks, cut at 1 | 3 | 6, twelve elements:
#
#     degree 1    0 1 2 3 4 5 6 7 8 9 10 11      every rank
#     degree 3    0 1 2 3|4 5 6 7|8 9 10 11      ranks 0,3 | 1,4 | 2,5
#     degree 6    0 1|2 3|4 5|6 7|8 9|10 11      rank  0|3|1|4|2|5
#
# Padding is zero in every state, so that norms and sums can run over whole shards.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from operator import mul
from typing import NamedTuple, TypeVar

ALIGN = 8  # elements: chunks and shards begin at multiples of 16 bytes in two-byte types
# Chunk size of an in-place slice exchange: large enough to amortize the cost of a message, small
# compared with a slice. On a GPU a message costs more, and a quarter of any slice is one.
_CHUNK_BYTES = 512 << 10
_LEAST_CHUNKS = 4

Shape = tuple[int, ...]
Part = TypeVar("Part")


def round_up(value: int, multiple: int) -> int:
    """Round a size up to a multiple of another."""
    return -(-value // multiple) * multiple


def shape_text(shape: Shape) -> str:
    """Return the shape as text, such as 3x4."""
    return "x".join(map(str, shape)) or "a scalar"


class Chunk(NamedTuple):
    """A rectangle of a tensor: its first index and its shape."""

    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def index_in(self, outer: Chunk) -> tuple[slice, ...]:
        """Return the index that takes this chunk out of a tensor that holds `outer`."""
        return tuple(
            slice(begin - base, begin - base + length)
            for begin, base, length in zip(self.offsets, outer.offsets, self.sizes, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamChunk:
    """A chunk of a parameter of shape `shape`: usually the whole parameter."""

    name: str
    shape: Shape
    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        return prod(self.sizes)


def whole_chunk(name: str, shape: Shape) -> ParamChunk:
    """Return the chunk that is a whole parameter."""
    return ParamChunk(name=name, shape=shape, offsets=(0,) * len(shape), sizes=shape)


def slice_chunk(name: str, shape: Shape, *, dim: int, index: int, number: int) -> ParamChunk:
    """Return chunk `index` of the `number` nearly equal chunks of a parameter along `dim`."""
    low, high = (shape[dim] * i // number for i in (index, index + 1))
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[dim], sizes[dim] = low, high - low
    return ParamChunk(name=name, shape=shape, offsets=tuple(offsets), sizes=tuple(sizes))


@dataclass(frozen=True, slots=True)
class ChunkRange:
    """The elements [low, high) of a chunk in row-major order, stored at `offset` of the buffer."""

    chunk: ParamChunk
    low: int
    high: int
    offset: int

    @property
    def stop(self) -> int:
        return self.offset + self.high - self.low


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """The flat order of one unit: matrices first, then norms and biases, then padding.

    A unit that is laid out slice by slice has this order in each of its equal slices.
    """

    chunks: tuple[ChunkRange, ...]  # whole chunks
    matrix_stop: int  # the elements of a slice before this one are of matrices
    numel: int  # a multiple of ALIGN times the world size
    num_slices: int = 1

    def matrix_stop_of(self, at: int) -> int:
        """Return the end of the matrices in the slice that has element `at` of the buffer."""
        length = self.numel // self.num_slices
        return at // length * length + self.matrix_stop

    def chunk_ranges(self, start: int, stop: int) -> Iterator[ChunkRange]:
        """Yield the ranges of chunks stored in [start, stop) of the buffer, without padding."""
        for placed in self.chunks:
            low, high = max(start, placed.offset), min(stop, placed.stop)
            if low < high:
                yield ChunkRange(placed.chunk, low - placed.offset, high - placed.offset, low)

    def gaps(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield the ranges within [start, stop) of the buffer that are padding."""
        position, end = start, self.numel if stop is None else stop
        for part in self.chunk_ranges(start, end):
            if position < part.offset:
                yield position, part.offset
            position = part.stop
        if position < end:
            yield position, end


EMPTY = UnitLayout((), matrix_stop=0, numel=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """The parameters that are gathered together, in a flat buffer of trainable and one of frozen.

    Engine and planner build and count a model from the list of its units, in forward order.
    """

    name: str
    part: str = ""  # where weights rotate: the part of the model that reads them
    trainable: UnitLayout = EMPTY
    frozen: UnitLayout = EMPTY
    borrows: tuple[str, ...] = ()  # other units whose parameters it also reads (a tied head)
    backward_needs_weight: bool = True
    replicated: bool = False  # params and grads are whole on every rank, under any strategy
    matrices: tuple[tuple[int, ...], ...] = ()  # that Muon would update: offset, rows, columns
    bucket_size: int = 1  # units of the bucket that begins with this one; 0 in its others

    @property
    def numel(self) -> int:
        return self.trainable.numel + self.frozen.numel

    @property
    def traffic_kind(self) -> tuple[object, ...]:
        """A key of units whose shards have equal bytes and whose collectives send equal bytes."""
        numels = self.trainable.numel, self.frozen.numel, self.trainable.matrix_stop
        return *numels, self.replicated, self.bucket_size, self.matrices


class Buffer(NamedTuple):
    """The flat buffer of a unit's parameters that train, or of its frozen ones."""

    unit: Unit
    trains: bool
    layout: UnitLayout
    unit_index: int

    @property
    def name(self) -> str:
        return self.unit.name if self.trains else f"{self.unit.name} (frozen)"


def buffers_of(units: Iterable[Unit]) -> list[Buffer]:
    """Return all buffers, by their numbers."""
    return [
        Buffer(unit, trains, layout, index)
        for index, unit in enumerate(units)
        for trains, layout in ((True, unit.trainable), (False, unit.frozen))
        if layout.numel
    ]


def in_buckets(trained: Iterable[tuple[int, Part]]) -> list[tuple[Part, ...]]:
    """Group all buffers that train, each given after its unit's `bucket_size`, in buckets."""
    parts = [*trained]
    return [
        tuple(part for _, part in parts[index : index + size])
        for index, (size, _) in enumerate(parts)
        if size
    ]


def make_layout(*slices: Sequence[ParamChunk], world_size: int) -> UnitLayout:
    """Return the layout of chunks in slices of equal length; `world_size` bounds the degrees."""
    number = len(slices)
    first = [[chunk for chunk in chunks if len(chunk.shape) > 1] for chunks in slices]
    others = [[chunk for chunk in chunks if len(chunk.shape) <= 1] for chunks in slices]
    matrix_stop, longest_of_others = (
        max(sum(round_up(chunk.numel, ALIGN) for chunk in chunks) for chunks in part)
        for part in (first, others)
    )
    assert world_size % number == 0, f"{number} slices on {world_size} ranks"
    length = round_up(matrix_stop + longest_of_others, ALIGN * (world_size // number))
    placed = []
    for index in range(number):
        for chunks, start in ((first[index], 0), (others[index], matrix_stop)):
            position = index * length + start
            for chunk in chunks:
                placed.append(ChunkRange(chunk, 0, chunk.numel, position))
                position = round_up(position + chunk.numel, ALIGN)
    return UnitLayout(tuple(placed), matrix_stop, number * length, num_slices=number)


def make_whole_layout(shapes: Mapping[str, Shape], *, world_size: int) -> UnitLayout:
    """Return the layout of whole parameters for any degree that divides `world_size`."""
    chunks = [whole_chunk(name, shape) for name, shape in shapes.items()]
    return make_layout(chunks, world_size=world_size)


def make_sliced_layout(
    shapes: Mapping[str, Shape],
    *,
    cuts: Mapping[str, int],
    number: int,
    world_size: int,
    half: int | None = None,
) -> UnitLayout:
    """Return the layout of matrices whose shard at degree `number` is one slice of each.

    `cuts` maps each name to the dim it is split along. With `half` the layout holds only the first
    (0) or second (1) half of every slice.
    """
    parts, first = (1, 0) if half is None else (2, half)
    slices = [
        [
            slice_chunk(name, shape, dim=cuts[name], index=index, number=number * parts)
            for name, shape in shapes.items()
        ]
        for index in range(first, number * parts, parts)
    ]
    return make_layout(*slices, world_size=world_size)


def halves_of(
    shapes: Mapping[str, Shape], *, cuts: Mapping[str, int], number: int, shares: int | None
) -> tuple[int | None, ...]:
    """Return the values of `half` for `make_sliced_layout`; (None,) if the slices cannot be halved.

    With `shares` matrices consist of that many equal blocks, such as heads, and are split between.
    """
    shortest = min(shape[cuts[name]] for name, shape in shapes.items())
    may_be = shortest >= 2 * number if shares is None else shares % (2 * number) == 0
    return (0, 1) if may_be else (None,)


def chunk_numel(numel: int, element_bytes: int, *, device_type: str) -> int:
    """Return the elements of one message of an in-place exchange of a slice."""
    quarter = max(1, -(-numel // _LEAST_CHUNKS))
    return quarter if device_type == "cuda" else min(quarter, _CHUNK_BYTES // element_bytes)


def split_range(whole: Chunk | ParamChunk, low: int, high: int) -> Iterator[tuple[int, Chunk]]:
    """Yield chunks that have the elements [low, high) of a chunk, each after its first element.

    In row-major order: the part of a row, full rows, the part of a row.
    """
    offsets, sizes = whole.offsets, whole.sizes
    row = prod(sizes[1:])
    whole_rows = round_up(low, row), high // row * row
    cuts = {low, high, *(at for at in whole_rows if low < at < high)}
    for begin, end in pairwise(sorted(cuts)):
        index = begin // row
        if begin % row == end % row == 0:
            corner = (offsets[0] + index, *offsets[1:]) if offsets else ()
            yield begin, Chunk(corner, ((end - begin) // row, *sizes[1:]) if sizes else ())
            continue
        skipped, within = index * row, Chunk(offsets[1:], sizes[1:])
        for position, part in split_range(within, begin - skipped, end - skipped):
            corner = (offsets[0] + index, *part.offsets)
            yield skipped + position, Chunk(corner, (1, *part.sizes))


def overlap(first: Chunk, second: Chunk) -> Chunk | None:
    """Return the chunk of elements that are in both chunks; None if there are none."""
    if len(first.offsets) != len(second.offsets):
        return None
    offsets, sizes = [], []
    for a, n, b, m in zip(*first, *second, strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None  # at once: most chunks of a state differ in their rows
        offsets.append(low)
        sizes.append(high - low)
    return Chunk(tuple(offsets), tuple(sizes))


def split(chunks: Sequence[Chunk], other: Chunk) -> tuple[list[Chunk], list[Chunk]]:
    """Split chunks into (parts inside `other`, parts outside `other`)."""
    inside, outside = [], []
    for chunk in chunks:
        common = overlap(chunk, other)
        if common is None:
            outside.append(chunk)
            continue
        inside.append(common)
        offsets, sizes = list(chunk.offsets), list(chunk.sizes)
        for dim, (begin, length) in enumerate(zip(*common, strict=True)):
            stop = offsets[dim] + sizes[dim]
            for low, high in ((offsets[dim], begin), (begin + length, stop)):
                if low < high:
                    corner = (*offsets[:dim], low, *offsets[dim + 1 :])
                    outside.append(Chunk(corner, (*sizes[:dim], high - low, *sizes[dim + 1 :])))
            offsets[dim], sizes[dim] = begin, length
    return inside, outside


def parameter_runs(chunk: ParamChunk, low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yield elements [low, high) of a chunk as (begin, end) ranges of the flattened parameter."""
    shape = chunk.shape
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    for _, (offsets, sizes) in split_range(chunk, low, high):
        dim = len(shape) - 1  # a run goes along this dim, behind which all are whole
        while dim > 0 and sizes[dim] == shape[dim]:
            dim -= 1
        before = zip(offsets[:dim], sizes[:dim], strict=True)
        for indices in product(*(range(first, first + size) for first, size in before)):
            begin = sum(map(mul, (*indices, *offsets[dim:]), strides))
            yield begin, begin + prod(sizes[dim:])
