"""The axis spans for which each collective algorithm needs process groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from paro.topology import Axes, AxisSpan, Link, Use, axes_of


def needed_groups(
    names: Iterable[str], runs: Mapping[Use, frozenset[AxisSpan]], *, pipelined: bool
) -> dict[Use, frozenset[AxisSpan]]:
    """The groups of a rank for collectives along `runs` by any of these algorithms.

    `pipelined`: ho-ring is a pipeline of the backend's own collectives, as under NCCL.
    """
    return {
        use: frozenset(
            part
            for run in spans
            for name in names
            for part in group_spans(name, run, pipelined=pipelined)
        )
        for use, spans in runs.items()
    }


def group_spans(name: str, run: AxisSpan, *, pipelined: bool) -> tuple[AxisSpan, ...]:
    """The parts of an axis span that need a process group, innermost first."""
    if not run:
        return ()
    if name == "flat":
        return (run,)
    if name == "native" or (name == "ho-ring" and pipelined and not has_both_links(run)):
        return tuple((axis,) for axis in run)
    return parts_of(name, run)


def parts_of(name: str, run: AxisSpan) -> tuple[AxisSpan, ...]:
    """The levels of `run` for ring, h-ring or ho-ring, innermost first; a level is one ring.

    Neighbouring axes with the same kind of links are one level: fewer hops, the same bytes.
    """
    if not run:
        return ()
    if name == "ring":
        return (run,)
    kinds = [tuple(axis for axis in run if axis.link is link) for link in (Link.INTRA, Link.INTER)]
    return tuple(part for part in kinds if part)


def has_both_links(run: AxisSpan) -> bool:
    """Whether a span has links inside groups and between them."""
    return bool(run) and axes_of(run) is Axes.BOTH
