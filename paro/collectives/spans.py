"""The axis spans for which each collective algorithm needs process groups."""

from __future__ import annotations

from paro.collectives.choice import AlgorithmChoice
from paro.topology import Axes, AxisSpan, Link, Spans, axes_of


def needed_groups(choice: AlgorithmChoice, spans: Spans) -> Spans:
    """Return the groups of a rank for collectives along `spans` by any algorithm of a choice."""
    return {
        kind: frozenset(
            part
            for span in of_kind
            for name in choice.names
            for part in group_spans(name, span, pipelined=choice.pipelines)
        )
        for kind, of_kind in spans.items()
    }


def group_spans(name: str, span: AxisSpan, *, pipelined: bool) -> tuple[AxisSpan, ...]:
    """Return the parts of an axis span that need a process group, innermost first."""
    if not span:
        return ()
    if name == "flat":
        return (span,)
    if name == "native" or (name == "ho-ring" and pipelined and not has_both_links(span)):
        return tuple((axis,) for axis in span)
    return ring_levels(name, span)


def ring_levels(name: str, span: AxisSpan) -> tuple[AxisSpan, ...]:
    """Return the levels of `span` for ring, h-ring or ho-ring, innermost first; a level is one
    ring.

    Neighbouring axes with the same kind of links are one level: fewer hops, the same bytes.
    """
    if not span:
        return ()
    if name == "ring":
        return (span,)
    kinds = [tuple(axis for axis in span if axis.link is link) for link in (Link.INTRA, Link.INTER)]
    return tuple(part for part in kinds if part)


def has_both_links(span: AxisSpan) -> bool:
    """Return whether a span has links inside groups and between them."""
    return bool(span) and axes_of(span) is Axes.BOTH
