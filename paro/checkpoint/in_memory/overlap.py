"""Overlaps and remainders of chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paro.layout import Chunk


def overlap(one: Chunk, other: Chunk) -> Chunk | None:
    """Return the chunk of elements that are in both chunks; None if there are none."""
    offsets, sizes = [], []
    for a, n, b, m in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        offsets.append(low)
        sizes.append(high - low)
    return Chunk(tuple(offsets), tuple(sizes))


def remainder(chunk: Chunk, others: Sequence[Chunk]) -> list[Chunk]:
    """Return disjoint chunks with the elements of `chunk` that are in none of `others`."""
    left = [chunk]
    for other in others:
        _, left = split(left, other)
    return left


def split(chunks: Sequence[Chunk], other: Chunk) -> tuple[list[Chunk], list[Chunk]]:
    """Split chunks into (parts inside `other`, parts outside `other`)."""
    inside = [part for one in chunks if (part := overlap(one, other)) is not None]
    return inside, [part for one in chunks for part in _outside(one, other)]


def _outside(chunk: Chunk, other: Chunk) -> Iterator[Chunk]:
    common = overlap(chunk, other)
    if common is None:
        yield chunk
        return
    offsets, sizes = list(chunk.offsets), list(chunk.sizes)
    for dim, (begin, length) in enumerate(zip(*common, strict=True)):
        stop = offsets[dim] + sizes[dim]
        for low, high in ((offsets[dim], begin), (begin + length, stop)):
            if low < high:
                yield Chunk(
                    (*offsets[:dim], low, *offsets[dim + 1 :]),
                    (*sizes[:dim], high - low, *sizes[dim + 1 :]),
                )
        offsets[dim], sizes[dim] = begin, length
