"""Arithmetic of regions: rectangles of a parameter, by corner and extent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from paro.layout import Shape


class Region(NamedTuple):
    """The elements from `corner` on, `extent` of them in each dim."""

    corner: Shape
    extent: Shape

    @property
    def numel(self) -> int:
        return prod(self.extent)

    def within(self, outer: Region) -> tuple[slice, ...]:
        """Return the index that takes this region out of a tensor that holds `outer`."""
        return tuple(
            slice(begin - base, begin - base + length)
            for begin, base, length in zip(self.corner, outer.corner, self.extent, strict=True)
        )


def overlap(one: Region, other: Region) -> Region | None:
    """Return the elements of both; None if there are none."""
    corner, extent = [], []
    for a, n, b, m in zip(one.corner, one.extent, other.corner, other.extent, strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        corner.append(low)
        extent.append(high - low)
    return Region(tuple(corner), tuple(extent))


def remainder(region: Region, taken: Sequence[Region]) -> list[Region]:
    """Return disjoint regions with the elements of `region` that are in none of `taken`."""
    left = [region]
    for hole in taken:
        left = [part for one in left for part in _outside(one, hole)]
    return left


def _outside(region: Region, hole: Region) -> Iterator[Region]:
    common = overlap(region, hole)
    if common is None:
        yield region
        return
    corner, extent = list(region.corner), list(region.extent)
    for dim, (begin, length) in enumerate(zip(common.corner, common.extent, strict=True)):
        stop = corner[dim] + extent[dim]
        for low, high in ((corner[dim], begin), (begin + length, stop)):
            if low < high:
                part = Region(
                    (*corner[:dim], low, *corner[dim + 1 :]),
                    (*extent[:dim], high - low, *extent[dim + 1 :]),
                )
                yield part
        corner[dim], extent[dim] = begin, length
