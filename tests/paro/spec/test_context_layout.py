"""Which tokens of a shared sample a rank has, and which layouts fit a model."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest

from model.config import LLAMA_PRESETS
from paro.spec.context_layout import ContextLayout, ContextLimits, num_head_chunks

LAYOUTS = [(1, 1), (2, 1), (2, 2), (3, 3), (4, 1), (4, 2), (4, 4), (6, 3), (6, 2), (8, 4), (8, 1)]


@pytest.mark.parametrize(("size", "heads"), LAYOUTS)
def test_the_ranks_that_share_a_sample_have_equal_parts_that_make_up_the_whole(
    size: int, heads: int
) -> None:
    layout, length = ContextLayout(size=size, heads=heads), 2 * size * 3
    parts = [[*chain(*layout.ranges(rank, length))] for rank in range(size)]
    assert {len(part) for part in parts} == {length // size}
    assert sorted(chain(*parts)) == list(range(length))
    assert layout.ranges(size + 1, length) == layout.ranges(1 % size, length)
    if heads == size:  # without a ring in order
        assert [*chain(*parts)] == list(range(length))


@pytest.mark.parametrize(("size", "heads"), LAYOUTS)
def test_every_place_of_the_ring_owns_as_much_causal_attention(size: int, heads: int) -> None:
    layout, length = ContextLayout(size=size, heads=heads), 2 * size * 2
    pairs = [0] * layout.ring
    for rank in range(size):
        for position in chain(*layout.ranges(rank, length)):
            pairs[rank // heads] += position + 1
    assert len(set(pairs)) == 1


def test_the_ranks_of_a_place_have_its_two_chunks_in_order() -> None:
    layout = ContextLayout(size=6, heads=3)  # the second of three ranks has the border
    parts = [layout.ranges(rank, 24) for rank in range(6)]
    assert parts[:3] == [(range(4),), (range(4, 6), range(18, 20)), (range(20, 24),)]
    assert [*chain(*chain(*parts[3:]))] == list(range(6, 18))


MODEL = replace(LLAMA_PRESETS["7B"], hidden_size=96, num_attention_heads=12, num_query_groups=3)
LIMITS = ContextLimits(model=MODEL, world_size=12, group_size=4, seq_length=24)


def test_what_does_not_fit_is_told() -> None:
    for size, heads, told in (
        (12, 3, "3 ranks and groups of 4"),
        (6, 1, "6 ranks and groups of 4"),
        (12, 1, None),
    ):
        found = LIMITS.reason_invalid(ContextLayout(size=size, heads=heads))
        assert found == told or (found is not None and told is not None and told in found)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "num_ranks", "num_chunks"),
    [(32, 32, 8, 4), (32, 8, 8, 4), (32, 16, 8, 2), (24, 24, 8, 1), (12, 6, 2, 1), (8, 8, 8, 1)],
)
def test_head_chunks_have_whole_groups_of_queries(
    num_heads: int, num_kv_heads: int, num_ranks: int, num_chunks: int
) -> None:
    layout = ContextLayout(size=num_ranks, heads=num_ranks)
    assert num_head_chunks(num_heads, num_kv_heads, layout) == num_chunks
