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
from paro.planning.run_memory import RunMemory
from paro.planning.search_space import (
    Candidate,
    PlanRequest,
    first_blocks,
    least_recomputation,
    recompute_flags,
)
from paro.spec.context_layout import SIZE_FLAG, ContextLayout
from paro.spec.run_spec import ContextLimits, Materialize, RunSpec
from paro.strategy import Strategy
from paro.text import size_text
from paro.topology import divisors

MOST_RANKS_TRIED = 16384  # the largest world size for which advice and curves are computed
estimator_of = lru_cache(maxsize=64)(Estimator)  # many changes have equal requests
_SMALLER = {
    Materialize.GATHER: (Materialize.ROTATE, "--paro-materialize rotate"),
    Materialize.ROTATE: (Materialize.ROTATE_IN_PLACE, "--paro-rotate-in-place"),
}


class FlagChange(NamedTuple):
    """A single change of flags after which a candidate fits."""

    what: str  # the flags to give, in words
    request: PlanRequest
    candidate: Candidate


def why_nothing_fits(request: PlanRequest, plan: SearchResult) -> str:
    """Write a line with the least memory and each single change that would make a candidate fit.

    More ranks are given with recomputation too, if that takes fewer ranks.
    """
    least = plan.least
    single = [
        *(change.what for change in single_changes(request, least.candidate)),
        *(what for what, _ in rank_changes(request, least.candidate)),
    ]
    changes = "; or ".join(single)
    return (
        f"nothing fits the {request.choice_text}: the least is "
        f"{size_text(least.memory_bytes)} with {least.candidate.describe()} "
        f"({least.memory.describe()}); use larger devices{changes and f'; or {changes}'}"
    )


def rank_changes(request: PlanRequest, least: Candidate) -> Iterator[tuple[str, str]]:
    """Yield how many ranks would be enough, in words, and the flags of `more_ranks` that they need.

    Nothing where collectives were measured: measurements hold only for the measured ranks. Nothing
    either where states may not be spread so far, for lost nodes or groups that train alone.
    """
    machine, run = request.machine, estimator_of(request).run_spec(least)
    memories, limit = RunMemory(machine), request.choice_bytes
    how = ", gathered" if run.materialize.rotates else ""

    def fits(run: RunSpec) -> bool:
        limits = request.limits._replace(world_size=run.world_size)
        is_feasible = limits.infeasible_reason(run.strategy, None) is None
        return is_feasible and memories.of(run).total <= limit

    for ranks, flags in more_ranks(run, machine.group_size, fits) if not machine.measured else ():
        what = f"{ranks} ranks, with all states spread over all of them{how}"
        yield f"{what}, and {flags}" if flags else what, flags


def single_changes(request: PlanRequest, least: Candidate) -> Iterator[FlagChange]:
    """Yield changes of flags, each of which alone would be enough."""
    at_once = replace(request, prefetch_units=0)
    if request.prefetch_units and _fits(at_once, least):
        yield FlagChange("--paro-prefetch-units 0", at_once, least)
    if request.can_offload:
        precision = replace(request.precision, optimizer_cpu_offload=True)
        offloading = replace(request, precision=precision)
        if _fits(offloading, least):
            yield FlagChange("--optimizer-cpu-offload", offloading, least)
    recompute = least_recomputation(
        replace(request.model, recompute=least.recompute),
        lambda recompute: _fits(request, replace(least, recompute=recompute)),
    )
    if recompute is not None:
        yield FlagChange(recompute_flags(recompute), request, replace(least, recompute=recompute))
    # A divisor of this size divides the batch, too.
    for size in reversed(divisors(least.micro_batch_size)[:-1]):
        smaller = replace(least, micro_batch_size=size)
        if _fits(request, smaller):
            yield FlagChange(f"--micro-batch-size {size}", request, smaller)
            break
    for flags, layout in larger_contexts(estimator_of(request).run_spec(least)):
        if _fits(request, shared := replace(least, context=layout)):
            yield FlagChange(flags, request, shared)
            break
    if least.materialize in _SMALLER:
        materialize, flag = _SMALLER[least.materialize]
        rotated = replace(least, materialize=materialize)
        possible = request.infeasible_reason(least.strategy, materialize) is None
        if possible and _fits(request, rotated):
            yield FlagChange(flag, request, rotated)


def larger_contexts(run: RunSpec) -> Iterator[tuple[str, ContextLayout]]:
    """Yield larger context-parallel layouts that a run may have, smallest first, with flags."""
    limits = ContextLimits(run, run.world_size)
    for size in range(run.context.size + 1, limits.most + 1):
        for name in ("p2p", "a2a"):
            layout = ContextLayout.of_type(name, size, flat=run.context.is_flat)
            if limits.reason_invalid(layout) is None:
                yield f"{SIZE_FLAG} {size} {layout.type_flags}", layout


def _fits(request: PlanRequest, candidate: Candidate) -> bool:
    return estimator_of(request).memory(candidate).total <= request.choice_bytes


def fewest_ranks(ranks: int, step: int, fits: Callable[[int], bool]) -> int | None:
    """Find the least number of ranks above `ranks` that fits, a multiple of `step`, else None.

    Memory decreases with the number of ranks, so bisection finds it.
    """
    low, most = ranks // step, MOST_RANKS_TRIED // step
    high = low + 1
    while high < most and not fits(high * step):
        low, high = high, min(2 * high, most)
    counts = range(low + 1, min(high, most) + 1)
    first = bisect_left(counts, True, key=lambda count: fits(count * step))
    return counts[first] * step if first < len(counts) else None


def more_ranks(
    run: RunSpec, ranks_per_node: int, fits: Callable[[RunSpec], bool]
) -> Iterator[tuple[int, str]]:
    """Yield the fewest ranks that are enough with all states spread over all of them, and "".

    Then fewer ranks that are enough with all blocks recomputed, and the flags for it, unless
    recomputation alone is enough. All are multiples of `ranks_per_node`, with equal batches.
    """
    every = first_blocks(run.model.num_layers, run.model)
    recomputed = replace(run, recompute=every)
    plans = [("", run), *[(recompute_flags(every), recomputed)] * (not fits(recomputed))]
    step, fewest = lcm(run.group_size, ranks_per_node, run.context.size), MOST_RANKS_TRIED + 1
    for flags, base in plans:

        def fits_on(ranks: int, base: RunSpec = base) -> bool:
            strategy = Strategy(name="GGG", params=ranks, grads=ranks, optim=ranks)
            gathered = Materialize.GATHER
            return fits(replace(base, world_size=ranks, strategy=strategy, materialize=gathered))

        ranks = fewest_ranks(run.world_size, step, fits_on)
        if ranks is not None and ranks < fewest:
            yield ranks, flags
            fewest = ranks
