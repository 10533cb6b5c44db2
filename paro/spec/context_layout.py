"""Layouts of context parallelism: the tokens and heads of a sample on each rank that shares it."""

# C = U x R neighbouring ranks share a sample (--context-parallel-size C), as R sets of U ranks. The
# ranks of a set exchange heads (a2a, DeepSpeed's Ulysses): outside attention each has 1/U of the
# set's tokens and all heads, inside attention all of the set's tokens and 1/U of the heads. The R
# sets form a ring (p2p, ring attention), or all-gather keys and values. As in Megatron-LM, a sample
# is cut into 2 R chunks, and each set has one chunk from either end, so that causal attention
# costs all sets equally much. With C = 4, the tokens of each rank in eighths of the sample:
#
#     U 1, R 4 (p2p)        rank 0: 0 7   1: 1 6   2: 2 5   3: 3 4
#     U 4, R 1 (a2a)        rank 0: 0 1   1: 2 3   2: 4 5   3: 6 7
#     U 2, R 2 (a2a+p2p)    rank 0: 0 1   1: 6 7   2: 2 3   3: 4 5

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from paro.collectives.choice import AlgorithmChoice, needed_groups
from paro.spec.kv_exchange import DoubleRing, GatheredKV
from paro.topology import COLLECTIVE_STREAMS, AxisSpan, Spans, StreamKind, Topology, make_topology

SIZE_FLAG, TYPE_FLAG = "--context-parallel-size", "--cp-comm-type"
SIZES_FLAG = "--hierarchical-context-parallel-sizes"
COMM_TYPES = ("p2p", "a2a", "allgather", "a2a+p2p")
_MOST_HEAD_CHUNKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLayout:
    """The division of a sample among `size` neighbouring ranks, in sets of `heads` ranks.

    The ranks of a set exchange heads. Keys and values of other sets are all-gathered with
    `gathers`, else sent round rings: first round an inner ring within `inner` ranks (0: as many as
    a group has), then round an outer ring.
    """

    size: int = 1  # C, the context-parallel degree
    heads: int = 1  # U, the ranks that exchange heads
    inner: int = 0  # ranks within which the inner ring runs, a multiple of U; C: one ring
    gathers: bool = False  # whether keys and values are all-gathered instead of sent round

    def __post_init__(self) -> None:
        for part in (self.heads, self.inner or self.size):
            assert self.size % part == 0, f"{part} ranks do not divide {self.size}"

    @classmethod
    def of_type(
        cls, comm_type: str, size: int, *, first: int = 0, flat: bool = False
    ) -> ContextLayout:
        """Return the layout that a communication type has on `size` ranks.

        `first` is the first of --hierarchical-context-parallel-sizes (0: not given), and `flat`
        asks for one ring over all groups.
        """
        inner = size if flat else 0
        match comm_type:
            case "a2a":
                return cls(size=size, heads=size)
            case "a2a+p2p":
                return cls(size=size, heads=min(first or 1, size), inner=inner)
            case "allgather":
                return cls(size=size, gathers=size > 1)
        return cls(size=size, inner=inner or min(first, size))

    @property
    def is_flat(self) -> bool:
        """True if keys and values go round one ring over all groups."""
        return self.inner == self.size

    @property
    def type_flags(self) -> str:
        """The command line words that select the layout on its number of ranks."""
        if self.gathers or self.ring == 1:
            return f"{TYPE_FLAG} {'allgather' if self.gathers else 'a2a'}"
        words = f"{TYPE_FLAG} {'p2p' if self.heads == 1 else 'a2a+p2p'}"
        if self.heads > 1 or 0 < self.inner < self.size:
            first = self.heads if self.heads > 1 else self.inner
            words += f" {SIZES_FLAG} {first} {self.size // first}"
        return words + " --paro-context-ring flat" * self.is_flat

    @property
    def ring(self) -> int:
        """The number R of sets, one rank of each in a ring."""
        return self.size // self.heads

    def ranges(self, rank: int, seq_length: int) -> tuple[range, ...]:
        """Return the positions in the sample of a rank's tokens, in their order on the rank.

        `seq_length` must be a multiple of 2 `size`.
        """
        assert seq_length % (2 * self.size) == 0, f"{seq_length} tokens on {self.size} ranks"
        share, chunk = seq_length // self.size, seq_length // (2 * self.ring)
        ring_rank = rank % self.size // self.heads
        begin = rank % self.heads * share
        ranges = []
        for number, index in enumerate((ring_rank, 2 * self.ring - 1 - ring_rank)):
            # This rank's share is a range over both chunks, laid end to end: cut it at each chunk.
            low = max(begin - number * chunk, 0)
            high = min(begin + share - number * chunk, chunk)
            if low < high:
                ranges.append(range(index * chunk + low, index * chunk + high))
        return tuple(ranges)

    def topology(self, *, world_size: int, group_size: int) -> Topology:
        """Return the topology with the axes of the head exchange and of the rings."""
        return make_topology(
            world_size=world_size,
            group_size=group_size,
            degrees=(self.heads, self.inner or self.size, self.size),
        )

    def heads_span(self, topology: Topology) -> AxisSpan:
        """Return the axes of `topology` along which ranks exchange heads."""
        return topology.axes_between(1, self.heads)

    def kv_exchange(self, topology: Topology) -> DoubleRing | GatheredKV:
        """Return how the ranks of a ring exchange keys and values."""
        if self.gathers:
            return GatheredKV(topology.axes_between(self.heads, self.size))
        cut = min(max(self.inner or topology.group_size, self.heads), self.size)
        inner, outer = (
            topology.axes_between(*ends) for ends in ((self.heads, cut), (cut, self.size))
        )
        return DoubleRing(inner, outer) if inner else DoubleRing(outer, inner)

    def groups(self, topology: Topology, choice: AlgorithmChoice) -> Spans:
        """Return the spans of a rank's process groups, for its algorithms of collectives."""
        if self.size == 1:
            return {}
        of_kv = self.kv_exchange(topology).spans.values()
        if self.gathers:
            return needed_groups(choice, dict.fromkeys(COLLECTIVE_STREAMS, frozenset(of_kv)))
        spans = self.heads_span(topology), *of_kv
        return {StreamKind.CONTEXT: frozenset(filter(None, spans))}


ALONE = ContextLayout()  # no context parallelism: every rank has whole samples


class HeadExchange(NamedTuple):
    """The messages in which the ranks that exchange heads send a micro-batch's attention."""

    num_chunks: int  # number of chunks of query heads, each sent while another one is computed
    kv_chunks: int  # number of chunks of keys and values: as many, or one that goes with the first
    repeats: int  # copies of each head of keys and values: a rank's queries need one


def head_exchange(num_heads: int, num_kv_heads: int, layout: ContextLayout) -> HeadExchange:
    """Return the chunks in which heads are exchanged.

    A chunk has whole groups of query heads with their key and value heads. Or, without a ring, all
    chunks share a single head of keys and values; on a ring it would be sent for every chunk.
    """
    repeats = max(1, layout.heads // num_kv_heads)
    queries, keys = num_heads // layout.heads, num_kv_heads * repeats // layout.heads
    if layout.heads == 1:
        return HeadExchange(1, 1, repeats)
    shared = keys == 1 and layout.ring == 1
    fitting = (num_chunks for num_chunks in (_MOST_HEAD_CHUNKS, 2) if queries % num_chunks == 0)
    num_chunks = next((number for number in fitting if shared or keys % number == 0), 1)
    return HeadExchange(num_chunks, num_chunks if keys > 1 else 1, repeats)
