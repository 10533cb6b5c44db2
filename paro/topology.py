"""The rank topology: axes between sharding degrees, the ranks along each, and their uses."""

# A divisor chain 1 = a_0 | a_1 | ... | a_K = n splits a rank into digits, innermost first:
# rank = sum of digit_k * a_k. Axis k spans from a_k to a_(k+1). Below the group size an axis is
# intra-group (fast links), above it inter-group. Two groups of 3 with the usual chain 1 | 3 | 6:
#
#     group 0:  0 1 2        axis 0 (intra, size 3): {0 1 2} {3 4 5}
#     group 1:  3 4 5        axis 1 (inter, size 2): {0 3} {1 4} {2 5}

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

MOST_RANKS = 1 << 20  # the largest world size that can be planned


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, in ascending order."""
    return [each for each in range(1, number + 1) if number % each == 0]


def count_nodes(world_size: int, ranks_per_node: int) -> int:
    """Count the nodes of a run, of which the last may have fewer ranks."""
    return -(-world_size // ranks_per_node)


class Link(Enum):
    """A kind of links, which an axis uses: inside groups or between them."""

    INTRA = "intra"
    INTER = "inter"


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes sent over each kind of link."""

    intra: int = 0
    inter: int = 0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.intra + other.intra, self.inter + other.inter)

    def __mul__(self, times: int) -> Sent:
        return Sent(self.intra * times, self.inter * times)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A digit of a rank (a mesh dim), which spans from degree `inner` to degree `outer`."""

    index: int
    inner: int
    outer: int
    link: Link

    @property
    def size(self) -> int:
        return self.outer // self.inner

    def digit(self, rank: int) -> int:
        """Return the position of `rank` along the axis."""
        return rank // self.inner % self.size


# Neighbouring axes, innermost first: the dims of a device mesh along which a collective runs.
AxisSpan = tuple[Axis, ...]


class StreamKind(Enum):
    """The communication of one comm stream, which has process groups of its own.

    EXCHANGE is of encoded gradients and of Muon's matrices, CONTEXT of samples that ranks share.
    """

    GATHER = "gather"
    REDUCE = "reduce"
    ROTATE = "rotate"
    EXCHANGE = "exchange"
    CONTEXT = "context"


class WaitKind(Enum):
    """The communication that the training thread waits for."""

    GATHER = "gather"  # parameters, before a unit runs
    REDUCE = "reduce"  # gradients, before the update and before their buffers are reused
    PARAM_ALL_GATHER = "publish"  # updated parameters, before they are read
    CONTEXT = "context"  # heads or keys and values, from ranks that share a sample, in attention


class PlannedWait(NamedTuple):
    """A kind of wait in a planned step: its words, and the kind that a run measures for it."""

    words: str
    measured: WaitKind | None  # None: as computing


PLANNED_WAITS = {  # by the names of their times in a plan
    "gather": PlannedWait("gathers", WaitKind.GATHER),
    "reduce": PlannedWait("gradient reductions", WaitKind.REDUCE),
    "finish": PlannedWait("the gradient reductions at the end of a step", WaitKind.REDUCE),
    "publish": PlannedWait("the all-gather of updated parameters", WaitKind.PARAM_ALL_GATHER),
    "context": PlannedWait("attention's tokens on other ranks", WaitKind.CONTEXT),
    "agree": PlannedWait("the gradient norm", None),
}
MOST_CTAS = 16  # what NCCL uses for NVLS on an H100 (nvls.cc); more would slow matmuls down
COLLECTIVE_STREAMS = (StreamKind.GATHER, StreamKind.REDUCE)  # of collectives on flat buffers
Spans = Mapping[StreamKind, frozenset[AxisSpan]]  # along which each kind communicates


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks of a run, in groups of `group_size` consecutive ranks, split into `axes`.

    `axes` are ordered innermost first; the outer degree of one is the inner degree of the next, and
    none has size 1.
    """

    world_size: int
    group_size: int
    axes: tuple[Axis, ...]

    def axes_between(self, coarse: int, fine: int) -> tuple[Axis, ...]:
        """Return the axis span from degree `coarse` to degree `fine`, which is no smaller."""
        span = tuple(a for a in self.axes if coarse <= a.inner and a.outer <= fine)
        ends = (span[0].inner, span[-1].outer) if span else (coarse, coarse)
        assert ends == (coarse, fine), f"degrees {coarse} and {fine} are not cuts of {self.axes}"
        return span

    def members(self, axes: tuple[Axis, ...], rank: int) -> tuple[int, ...]:
        """Return `rank` and the ranks that differ from it only along an axis span, ascending."""
        if not axes:
            return (rank,)
        inner, outer = axes[0].inner, axes[-1].outer
        first = rank - rank % outer + rank % inner
        return tuple(range(first, first + outer, inner))

    def in_order_of_shards(self, span: AxisSpan, rank: int) -> tuple[int, ...]:
        """Return the members of a span in the order of their shards at its fine degree."""
        members = self.members(span, rank)
        return tuple(sorted(members, key=lambda member: nested_range(span, member, len(members))))

    def shard_start(self, rank: int, degree: int, numel: int) -> int:
        """Return the offset of `rank`'s shard at `degree` in a flat buffer of `numel` elements.

        The shard has `numel / degree` elements and is inside the shard at every coarser degree.
        """
        return nested_range(self.axes_between(1, degree), rank, numel)[0]


def nested_range(span: tuple[Axis, ...], rank: int, numel: int) -> tuple[int, int]:
    """Return [start, stop) of a rank's shard at the fine degree of a span in the coarse shard."""
    start, size = 0, numel
    for axis in span:
        assert size % axis.size == 0, f"{numel} elements cannot be cut along {span}"
        size //= axis.size
        start += axis.digit(rank) * size
    return start, start + size


def by_units(span: AxisSpan, units: int) -> AxisSpan:
    """Return a span in the order in which its axes cut a buffer of `units` consecutive units.

    With several units, each position along the outermost axis has the shards of one of them.
    """
    assert units == 1 or span[-1].size == units, f"{units} units for the positions of {span}"
    return span if units == 1 else (*span[-1:], *span[:-1])


@lru_cache(maxsize=1024)
def make_topology(*, world_size: int, group_size: int, degrees: tuple[int, ...]) -> Topology:
    """Return the topology that is cut at every degree, the group size and the world size."""
    cuts = sorted({1, *degrees, group_size, world_size})
    axes = []
    for index, (inner, outer) in enumerate(pairwise(cuts)):
        assert outer % inner == 0, f"{cuts} is no divisor chain"
        link = Link.INTRA if outer <= group_size else Link.INTER
        axes.append(Axis(index=index, inner=inner, outer=outer, link=link))
    return Topology(world_size, group_size, tuple(axes))


class Axes(Enum):
    """The kinds of links that the axes of a collective use."""

    INTRA = "intra"
    INTER = "inter"
    BOTH = "both"


def axes_of(span: Sequence[Axis]) -> Axes:
    """Return the kinds of links of an axis span, which must not be empty."""
    kinds = {axis.link for axis in span}
    assert kinds, "an empty span moves nothing"
    return Axes(kinds.pop().value) if len(kinds) == 1 else Axes.BOTH


def split_by_link(span: Sequence[Axis]) -> tuple[AxisSpan, AxisSpan]:
    """Return the axes of a span that are inside groups, and the axes between groups."""
    intra = tuple(axis for axis in span if axis.link is Link.INTRA)
    return intra, tuple(axis for axis in span if axis.link is Link.INTER)
