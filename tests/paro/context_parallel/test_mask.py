"""The mask blocks of all ring ranks are the mask of causal documents, each pair once."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from paro.context_parallel.blockwise import Bounds, bounds_of, mask_block, own_lengths

Case = tuple[int, int, list[set[int]]]  # ring_size, tokens of a chunk, where documents begin


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ring_size, chunk = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    starts = st.sets(st.integers(1, 2 * ring_size * chunk - 1))
    return ring_size, chunk, draw(st.lists(starts, min_size=1, max_size=3))


def owned(ring_rank: int, ring_size: int, chunk: int) -> list[int]:
    """The positions of a rank's tokens."""
    starts = ring_rank * chunk, (2 * ring_size - 1 - ring_rank) * chunk
    return [position for start in starts for position in range(start, start + chunk)]


def pairs_of(bounds: Bounds, ring_rank: int, source: int, ring_size: int) -> list[tuple[int, int]]:
    """(query, key) positions that the blocks of two ring ranks have."""
    chunk = bounds[-1] // (2 * ring_size)
    queries, keys = owned(ring_rank, ring_size, chunk), owned(source, ring_size, chunk)
    if source == ring_rank:
        ends = list(accumulate(own_lengths(bounds, ring_rank, ring_size), initial=0))
        return [
            (queries[row], keys[column])
            for begin, end in pairwise(ends)
            for row in range(begin, end)
            for column in range(begin, row + 1)
        ]
    block = mask_block(bounds, ring_rank, source, ring_size)
    if block is None:
        return []
    rows, columns = queries[block[0]], keys[block[1]]
    assert rows
    assert columns
    return [(row, column) for row in rows for column in columns]


@settings(deadline=None)  # others may have the processor
@given(cases())
@example((3, 2, [set()]))
@example((4, 2, [{1, 2, 3}, {7}, set(range(1, 16))]))
def test_the_blocks_are_the_mask(case: Case) -> None:
    ring_size, chunk, starts = case
    seq_length = 2 * ring_size * chunk
    samples = [(0, *sorted(one), seq_length) for one in starts]
    lengths = tuple(stop - start for one in samples for start, stop in pairwise(one))
    assert bounds_of(lengths, seq_length) == tuple(samples)
    for bounds in samples:
        document = [sum(start <= position for start in bounds) for position in range(seq_length)]
        found = Counter(
            pair
            for ring_rank in range(ring_size)
            for source in range(ring_size)
            for pair in pairs_of(bounds, ring_rank, source, ring_size)
        )
        assert found == {
            (query, key): 1
            for query in range(seq_length)
            for key in range(query + 1)
            if document[query] == document[key]
        }
