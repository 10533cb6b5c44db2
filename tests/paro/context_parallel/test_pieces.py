"""The squares and rectangles of all places are the mask of causal documents, each pair once."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from paro.context_parallel.pieces import Bounds, bounds_of, rectangle, squares

Case = tuple[int, int, list[set[int]]]  # places, tokens of a chunk, where documents begin


@st.composite
def cases(draw: st.DrawFn) -> Case:
    places, chunk = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    starts = st.sets(st.integers(1, 2 * places * chunk - 1))
    return places, chunk, draw(st.lists(starts, min_size=1, max_size=3))


def owned(ring_rank: int, places: int, chunk: int) -> list[int]:
    """The positions of a rank's tokens."""
    starts = ring_rank * chunk, (2 * places - 1 - ring_rank) * chunk
    return [position for start in starts for position in range(start, start + chunk)]


def pairs_of(bounds: Bounds, ring_rank: int, source: int, places: int) -> list[tuple[int, int]]:
    """(query, key) positions that the pieces of two places have."""
    chunk = bounds[-1] // (2 * places)
    queries, keys = owned(ring_rank, places, chunk), owned(source, places, chunk)
    if source == ring_rank:
        ends = list(accumulate(squares(bounds, ring_rank, places), initial=0))
        return [
            (queries[row], keys[column])
            for begin, end in pairwise(ends)
            for row in range(begin, end)
            for column in range(begin, row + 1)
        ]
    piece = rectangle(bounds, ring_rank, source, places)
    if piece is None:
        return []
    rows, columns = queries[piece.queries], keys[piece.keys]
    assert rows
    assert columns
    return [(row, column) for row in rows for column in columns]


@settings(deadline=None)  # others may have the processor
@given(cases())
@example((3, 2, [set()]))
@example((4, 2, [{1, 2, 3}, {7}, set(range(1, 16))]))
def test_the_pieces_are_the_mask(case: Case) -> None:
    places, chunk, starts = case
    seq_length = 2 * places * chunk
    samples = [(0, *sorted(one), seq_length) for one in starts]
    lengths = tuple(stop - start for one in samples for start, stop in pairwise(one))
    assert bounds_of(lengths, seq_length) == tuple(samples)
    for bounds in samples:
        document = [sum(start <= position for start in bounds) for position in range(seq_length)]
        found = Counter(
            pair
            for ring_rank in range(places)
            for source in range(places)
            for pair in pairs_of(bounds, ring_rank, source, places)
        )
        assert found == {
            (query, key): 1
            for query in range(seq_length)
            for key in range(query + 1)
            if document[query] == document[key]
        }
