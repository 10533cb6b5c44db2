"""Pipelines: how their stages overlap, and how a shard is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest

from paro.collectives.pipeline import chunk_ranges, make_pipeline
from paro.collectives.schedule import Op
from paro.layout import ALIGN


@pytest.mark.parametrize("op", Op)
def test_a_level_works_on_the_next_chunk_while_the_other_has_this_one(op: Op) -> None:
    """Stages take one unit of time; a level runs its stages in the order of their queue."""
    num_chunks = 6
    stages = make_pipeline(op, num_chunks)
    free, end = [0, 0], list[int]()
    for stage in stages:
        begin = max(free[stage.level], 0 if stage.after is None else end[stage.after])
        end.append(begin + 1)
        free[stage.level] = begin + 1
    busiest = max(sum(stage.level == level for stage in stages) for level in (0, 1))
    fills = 0 if op is Op.ALL_REDUCE else 1  # the first chunk is alone
    assert max(end) == busiest + fills


def test_an_all_reduce_brings_in_the_next_chunk_before_it_takes_one_out() -> None:
    inside = [s for s in make_pipeline(Op.ALL_REDUCE, 3) if s.level == 0]
    order = [(stage.op is Op.ALL_GATHER, stage.chunk) for stage in inside]
    assert order == [(False, 0), (False, 1), (True, 0), (False, 2), (True, 1), (True, 2)]


@pytest.mark.parametrize(("numel", "num_chunks"), [(8, 1), (8, 4), (64, 4), (72, 4), (8000, 7)])
def test_chunks_are_even_and_aligned(numel: int, num_chunks: int) -> None:
    ranges = chunk_ranges(numel, num_chunks)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == numel
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    assert all(start % ALIGN == 0 and stop > start for start, stop in ranges)
    sizes = [stop - start for start, stop in ranges]
    assert max(sizes) - min(sizes) <= ALIGN
