"""Advice if nothing fits: the least memory, and single changes that would be enough."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from math import lcm
from typing import NamedTuple

from paro.planning.estimator import Estimator
from paro.planning.planner import SearchResult
from paro.planning.search_space import (
    Candidate,
    PlanRequest,
    first_blocks,
    least_recomputation,
    recompute_flags,
)
from paro.spec.context_layout import ContextLayout, ContextLimits
from paro.spec.run_spec import Materialize, RunSpec
from paro.text import size_text

MOST_RANKS = 16384  # the largest world size that is tried
estimator_of = lru_cache(maxsize=64)(Estimator)  # many changes have equal requests
_SMALLER = {
    Materialize.GATHER: (Materialize.ROTATE, "--paro-materialize rotate"),
    Materialize.ROTATE: (Materialize.ROTATE_IN_PLACE, "--paro-rotate-in-place"),
}


class Change(NamedTuple):
    """A single change after which a candidate fits."""

    what: str  # the flags to give, in words
    request: PlanRequest
    candidate: Candidate


def why_nothing_fits(request: PlanRequest, plan: SearchResult) -> str:
    """Write a line with the least memory and each single change that would make a candidate fit.

    More ranks are given with recomputation too, if that takes fewer ranks.
    """
    least = plan.least
    found = [*single_changes(request, least.candidate), *_recomputed(request, least.candidate)]
    changes = "; or ".join(change.what for change in found)
    return (
        f"nothing fits the {request.choice_text}: the least is "
        f"{size_text(least.memory_bytes)} with {least.candidate.describe()} "
        f"({least.memory.describe()}); use larger devices{changes and f'; or {changes}'}"
    )


def single_changes(request: PlanRequest, least: Candidate) -> Iterator[Change]:
    """Yield changes of flags, and of the number of ranks, each of which alone would be enough."""
    at_once = replace(request, prefetch_units=0)
    if request.prefetch_units and _fits(at_once, least):
        yield Change("--paro-prefetch-units 0", at_once, least)
    recompute = least_recomputation(
        replace(request.model, recompute=least.recompute),
        lambda recompute: _fits(request, replace(least, recompute=recompute)),
    )
    if recompute is not None:
        yield Change(recompute_flags(recompute), request, replace(least, recompute=recompute))
    given = least.micro_batch_size  # a divisor of this size divides the batch, too
    for size in (size for size in range(given - 1, 0, -1) if given % size == 0):
        smaller = replace(least, micro_batch_size=size)
        if _fits(request, smaller):
            yield Change(f"--micro-batch-size {size}", request, smaller)
            break
    if not least.materialize.rotates:
        run = estimator_of(request).run_spec(least)
        for flags, layout in larger_contexts(run):
            if _fits(request, shared := replace(least, context=layout)):
                yield Change(flags, request, shared)
                break
    if least.materialize in _SMALLER:
        materialize, flag = _SMALLER[least.materialize]
        rotated = replace(least, materialize=materialize)
        possible = request.infeasible_reason(least.strategy, materialize) is None
        if possible and _fits(request, rotated):
            yield Change(flag, request, rotated)
    yield from _more_ranks(request, least)


def larger_contexts(run: RunSpec) -> Iterator[tuple[str, ContextLayout]]:
    """Yield larger context-parallel layouts that a run may have, smallest first, with flags.

    Rings are tried only where attention can be computed in parts.
    """
    limits = ContextLimits(
        model=run.model,
        world_size=run.world_size,
        group_size=run.group_size,
        seq_length=run.seq_length,
    )
    in_parts = run.model.parts_misfit(run.device_type, run.precision.compute) is None
    for size in range(run.context.size + 1, run.world_size + 1):
        for name, heads in (("p2p", 1), ("a2a", size)) if in_parts else (("a2a", size),):
            layout = ContextLayout(size=size, heads=heads)
            if limits.misfit(layout) is None:
                yield f"--context-parallel-size {size} --cp-comm-type {name}", layout


def _fits(request: PlanRequest, candidate: Candidate) -> bool:
    return estimator_of(request).memory(candidate).total <= request.choice_bytes


def fewest_ranks(given: int, step: int, fits: Callable[[int], bool]) -> int | None:
    """Find the least number of ranks above `given` that fits, a multiple of `step`, else None.

    Memory decreases with the number of ranks, so bisection finds it.
    """
    low, most = given // step, MOST_RANKS // step
    high = low + 1
    while high < most and not fits(high * step):
        low, high = high, min(2 * high, most)
    counts = range(low + 1, min(high, most) + 1)
    found = bisect_left(counts, True, key=lambda count: fits(count * step))
    return counts[found] * step if found < len(counts) else None


def _recomputed(request: PlanRequest, least: Candidate) -> Iterator[Change]:
    """Yield more ranks with all blocks recomputed, unless recomputation alone is enough."""
    every = first_blocks(request.model.num_layers, request.model)
    recomputed = replace(least, recompute=every)
    if least.recompute == every or _fits(request, recomputed):
        return
    fewest = [change.request.world_size for change in _more_ranks(request, least)]
    for change in _more_ranks(request, recomputed):
        if not fewest or change.request.world_size < fewest[0]:
            yield change._replace(what=f"{change.what}, and {recompute_flags(every)}")


def _more_ranks(request: PlanRequest, least: Candidate) -> Iterator[Change]:
    """Yield the least number of groups that is enough, at an equal batch per rank.

    Nothing where collectives were measured: measurements hold only for the measured ranks.
    """
    if request.machine.measured:
        return

    def spread(ranks: int) -> tuple[PlanRequest, Candidate]:
        machine = replace(request.machine, uneven=()).for_world(ranks, subject="more ranks")
        batch = request.global_batch_size * ranks // request.world_size
        more = replace(request, machine=machine, global_batch_size=batch)
        strategy = more.strategy(f"{ranks},{ranks},{ranks}")
        return more, replace(least, strategy=strategy, materialize=Materialize.GATHER)

    step = lcm(request.group_size, request.machine.group_size, least.context.size)
    ranks = fewest_ranks(request.world_size, step, lambda ranks: _fits(*spread(ranks)))
    if ranks is not None:
        how = ", gathered" if least.materialize.rotates else ""
        yield Change(f"{ranks} ranks, with all states spread over all of them{how}", *spread(ranks))
