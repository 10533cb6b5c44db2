"""The choice of an algorithm for a collective by its size, and the process groups that it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paro.collectives.schedule import Op
from paro.topology import Axes, AxisSpan, Spans, axes_of, split_by_link

BestOf = Callable[[Op, Axes, int], str]
ChunkCount = Callable[[Op, AxisSpan, int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmChoice:
    """Algorithms to choose from and the function that picks one; equal on every rank.

    `best(op, axes, num_bytes)` returns one of `names` for a collective, the kinds of axes that it
    uses, and the bytes of the whole buffer in the communication dtype. None: the first of `names`.

    `num_chunks(op, span, num_bytes)` returns the number of chunks of a collective by ho-ring, which
    is a pipeline of the backend's own collectives then (for NCCL). None: point-to-point messages.
    """

    names: tuple[str, ...]
    best: BestOf | None = None
    num_chunks: ChunkCount | None = None

    def of(self, op: Op, span: AxisSpan, num_bytes: int) -> str:
        """Return the algorithm for a collective of `num_bytes`; along no axes the first one."""
        return self.best(op, axes_of(span), num_bytes) if self.best and span else self.names[0]


def needed_groups(choice: AlgorithmChoice, spans: Spans) -> Spans:
    """Return the groups of a rank for collectives along `spans` by any algorithm of a choice."""
    return {
        kind: frozenset(
            part
            for span in of_kind
            for name in choice.names
            for part in group_spans(name, span, pipelined=choice.num_chunks is not None)
        )
        for kind, of_kind in spans.items()
    }


def group_spans(name: str, span: AxisSpan, *, pipelined: bool) -> tuple[AxisSpan, ...]:
    """Return the parts of an axis span that need a process group, innermost first."""
    if name == "native" or (name == "ho-ring" and pipelined and not has_both_links(span)):
        return tuple((axis,) for axis in span)
    return ring_levels(name, span)


def ring_levels(name: str, span: AxisSpan) -> tuple[AxisSpan, ...]:
    """Return the levels of a span for h-ring or ho-ring, innermost first; one for ring and flat.

    A level is one ring. Neighbouring axes with one kind of links form one level: fewer hops.
    """
    return tuple(filter(None, (span,) if name in ("ring", "flat") else split_by_link(span)))


def has_both_links(span: AxisSpan) -> bool:
    """Return whether a span has links inside groups and between them."""
    return bool(span) and axes_of(span) is Axes.BOTH
