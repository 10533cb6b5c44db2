"""The causal mask of a ring rank's queries and another rank's keys, with documents kept apart."""

# A sample is cut into 2R chunks; ring rank p of R owns chunks p and 2R - 1 - p, in this order. Ring
# rank 1's queries (rows) attend to these keys (columns) if R is 3 and a sample is one document; x
# is a full block of the mask, \ a causal one:
#
#     chunk   0  1  2  3  4  5
#         1   x  \                  keys of ring rank 1     one causal square of both chunks
#         4   x  x  x  x  \         keys of ring rank 0     all queries, keys of the first chunk
#                                   keys of ring rank 2     queries of the second chunk, all keys
#
# Documents cut the causal square into smaller squares: a document's tokens are neighbours among a
# rank's tokens even if the document is in both chunks. Between two ranks, only the document of the
# last key before the queries can have queries and keys: at most one full block of the mask.

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

Bounds = tuple[int, ...]  # first positions of the documents of a sample, and the sample's length


class MaskBlock(NamedTuple):
    """Queries of one rank and keys of another, all attended to, as slices of the ranks' tokens."""

    queries: slice
    keys: slice


@lru_cache(maxsize=8)
def bounds_of(lengths: tuple[int, ...], seq_length: int) -> tuple[Bounds, ...]:
    """Return the bounds of each sample, from the lengths of the documents of all samples."""
    samples, bounds = [], [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
        if bounds[-1] == seq_length:
            samples.append(tuple(bounds))
            bounds = [0]
    assert bounds == [0], f"documents of {lengths} tokens are no samples of {seq_length}"
    return tuple(samples)


def own_lengths(bounds: Bounds, ring_rank: int, ring_size: int) -> list[int]:
    """Return the lengths of documents, or their parts, among a rank's own tokens."""
    owned = _Chunks(bounds, ring_rank, ring_size)
    cuts = sorted({owned.before(bound) for bound in bounds})
    return [stop - start for start, stop in pairwise(cuts)]


def mask_block(bounds: Bounds, ring_rank: int, source: int, ring_size: int) -> MaskBlock | None:
    """Return the queries of `ring_rank` and the keys of another ring rank that they attend to."""
    queries, keys = (_Chunks(bounds, at, ring_size) for at in (ring_rank, source))
    if source < ring_rank:
        first_query, query, key_stop, last_key = queries.first, 0, keys.size, keys.first
    else:
        first_query, query = queries.second, queries.size
        key_stop, last_key = 2 * keys.size, keys.second
    last_key += keys.size - 1
    number = bisect_right(bounds, last_key)
    begin, end = bounds[number - 1], bounds[number]
    if end <= first_query:
        return None
    return MaskBlock(slice(query, queries.before(end)), slice(keys.before(begin), key_stop))


class _Chunks:
    """The two chunks of a ring rank: their size and first positions."""

    def __init__(self, bounds: Sequence[int], ring_rank: int, ring_size: int) -> None:
        self.size = bounds[-1] // (2 * ring_size)
        self.first = ring_rank * self.size
        self.second = (2 * ring_size - 1 - ring_rank) * self.size

    def before(self, position: int) -> int:
        """Return the number of this rank's tokens before a position of the sample."""
        return sum(min(max(position - start, 0), self.size) for start in (self.first, self.second))
