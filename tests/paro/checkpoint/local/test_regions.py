"""Regions: overlaps and remainders, against sets of elements."""

from __future__ import annotations

from itertools import product
from random import Random

from paro.checkpoint.local.regions import Region, overlap, remainder


def elements(region: Region) -> set[tuple[int, ...]]:
    ranges = (range(a, a + n) for a, n in zip(region.corner, region.extent, strict=True))
    return set(product(*ranges))


def any_region(random: Random, num_dims: int) -> Region:
    return Region(
        tuple(random.randrange(4) for _ in range(num_dims)),
        tuple(random.randrange(1, 5) for _ in range(num_dims)),
    )


def test_overlap_and_remainder_are_those_of_sets() -> None:
    random = Random(0)
    for number in range(600):
        one, *others = (any_region(random, number % 4) for _ in range(4))
        common = overlap(one, others[0])
        assert (set() if common is None else elements(common)) == elements(one) & elements(
            others[0]
        )
        parts = remainder(one, others)
        left = elements(one).difference(*map(elements, others))
        assert sum(part.numel for part in parts) == len(left), "disjoint"
        assert set().union(*map(elements, parts)) == left


def test_a_scalar_is_one_element() -> None:
    scalar = Region((), ())
    assert scalar.numel == 1
    assert overlap(scalar, scalar) == scalar
    assert remainder(scalar, [scalar]) == []


def test_within_indexes_a_tensor_of_the_outer_region() -> None:
    inner, outer = Region((3, 4), (2, 1)), Region((1, 4), (5, 5))
    assert inner.within(outer) == (slice(2, 4), slice(0, 1))
