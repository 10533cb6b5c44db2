"""Compares ways to share samples by the step that the planner predicts for each."""

# Of all that fits the fastest is the best, among equally fast ones that with the fewest ranks. C
# ranks that share a sample make C times as many micro-batches of a step, and leave memory for
# larger ones: with C also micro-batches of up to C times as many samples are compared, which are
# then as many as without.

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from model.config import LlamaConfig
from paro.config.context_parallel import (
    AUTO,
    TYPES,
    ContextParallelConfig,
    context_options,
    take_context,
    usable_types,
)
from paro.errors import UserError
from paro.planning.description import seconds_text
from paro.planning.estimator import Estimator
from paro.planning.planner import TIE, best_by_context
from paro.planning.search_space import PlanRequest, SearchSpace
from paro.spec.context_layout import ContextLimits
from paro.strategy import Strategy

SIZE, _TYPE = "--context-parallel-size", "--cp-comm-type"
WORTH = 0.05  # share of a step that another type must save to be named

Made = TypeVar("Made")


def auto_flag(args: Namespace) -> str | None:
    """Return the flag that says auto, the number of ranks first; None if neither does."""
    if args.context_parallel_size == AUTO:
        return SIZE
    return _TYPE if {*args.cp_comm_type} == {AUTO} else None


def requested_types(
    args: Namespace, model: LlamaConfig, device_type: str, compute: str
) -> Sequence[str]:
    """Return the types among which the flags let choose, of those that this model's attention can
    do."""
    given = TYPES if {*args.cp_comm_type} == {AUTO} else (take_context(args).cp_comm_type,)
    return usable_types(given, model, device_type, compute)


def requested_options(
    args: Namespace, types: Sequence[str], limits: ContextLimits
) -> list[ContextParallelConfig]:
    """Those among which the flags let choose, of these types."""
    sizes: Sequence[int] = (args.context_parallel_size,)
    if args.context_parallel_size == AUTO:
        sizes = [n for n in range(1, limits.world_size + 1) if limits.world_size % n == 0]
    return [*context_options(take_context(args), sizes, types, limits)]


def with_batches(
    found: Sequence[ContextParallelConfig],
    micro_batch_size: int,
    make: Callable[[ContextParallelConfig, int], Made],
    *,
    grows: bool,
) -> dict[tuple[ContextParallelConfig, int], Made]:
    """Map each way, with each size of micro-batches that the batch allows, to `make(way, size)`.

    Where a micro-batch `grows`, it has up to as many times the samples as ranks share them.
    `UserError` if the batch allows none.
    """
    made = {}
    for cp in found:
        most = cp.context_parallel_size if grows else 1
        for size in (n * micro_batch_size for n in range(1, most + 1) if most % n == 0):
            with suppress(UserError):  # the batch is no multiple
                made[cp, size] = make(cp, size)
    return made or {(found[0], micro_batch_size): make(found[0], micro_batch_size)}  # says why


def choose(
    flag: str,
    request: PlanRequest,
    found: Iterable[tuple[ContextParallelConfig, int]],
    space: SearchSpace,
) -> tuple[ContextParallelConfig, int, tuple[str, ...]]:
    """Choose the fastest layout and micro-batch size of those found; return them with log lines.

    If nothing fits, the layout that needs least memory, with micro-batches as given.
    """
    pairs = [*found]
    space = replace(space, contexts=tuple((cp.layout, size) for cp, size in pairs))
    best = best_by_context(request, space)
    seconds = {cp: own.seconds if (own := best[cp.layout]) else math.inf for cp, _ in pairs}
    least = min(seconds.values())

    def order(cp: ContextParallelConfig) -> tuple[float, int]:
        tied = seconds[cp] <= least * (1 + TIE)
        return 0.0 if tied else seconds[cp], cp.context_parallel_size

    cp, *others = sorted(seconds, key=order)
    if (fastest := best[cp.layout]) is None:
        (strategy, *_) = space.strategies or (request.strategy("GGG"),)
        given, estimator = request.candidate(strategy), Estimator(request)
        cp = min(
            (cp, *others),
            key=lambda cp: estimator.memory(replace(given, context=cp.layout)).total,
        )
        line = f"planner: {flag} auto: {cp.describe()}, which needs least: nothing fits"
        return cp, request.micro_batch_size, (line,)
    size = fastest.candidate.micro_batch_size
    line = (
        f"planner: {flag} auto: {cp.describe()}, micro-batches of {size}: "
        f"{seconds_text(fastest.seconds)} a step, the best of {len(seconds)} ways"
    )
    sizes, compared = {cp.context_parallel_size}, []
    for other in others:
        if other.context_parallel_size not in sizes or flag == _TYPE:
            sizes.add(other.context_parallel_size)
            more = f"{seconds[other] / fastest.seconds - 1:.1%} more"
            compared.append(f"{other.describe()}: {more if best[other.layout] else 'does not fit'}")
    return cp, size, (line, f"planner: {'; '.join(compared)}") if compared else (line,)


def faster_type(
    given: ContextParallelConfig, request: PlanRequest, strategy: Strategy
) -> str | None:
    """Return the flags of another type with which a step fits and is clearly faster, if any."""
    candidate, estimator = request.candidate(strategy), Estimator(request)
    own = estimator.estimate(candidate).seconds
    least, fastest = own / (1 + WORTH), None
    model, compute = request.model, request.precision.compute
    any_sizes = replace(given, hierarchical_context_parallel_sizes=None)
    types = usable_types(TYPES, model, request.device_type, compute)
    for cp in context_options(
        any_sizes, [given.context_parallel_size], types, request.context_limits
    ):
        other = replace(candidate, context=cp.layout)
        if estimator.costs(other).least_seconds() < least:
            estimate = estimator.estimate(other)
            if estimate.fits and estimate.seconds < least:
                least, fastest = estimate.seconds, cp
    if fastest is None:
        return None
    return f"{fastest.flag_text} would be {own / least - 1:.0%} faster, as the planner predicts"
