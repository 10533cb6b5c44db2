"""Compares ways to share samples by the step that the planner predicts for each."""

# Of all that fits the fastest is the best, among equally fast ones that with the fewest ranks. C
# ranks that share a sample make C times as many micro-batches of a step, and leave memory for
# larger ones: with C also micro-batches of up to C times as many samples are compared, which are
# then as many as without.

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from model.config import LlamaConfig
from paro.config.context_parallel import (
    AUTO,
    TYPES,
    ContextParallelConfig,
    take_context,
    usable_types,
    ways,
)
from paro.context_parallel.layout import ContextLimits
from paro.errors import UserError
from paro.planning.search.description import seconds_text
from paro.planning.search.estimator import Estimate, Estimator
from paro.planning.search.planner import TIE, best_that_fits
from paro.planning.search.search_space import SearchSpace, Workload
from paro.strategy import Strategy

_SIZE, _TYPE = "--context-parallel-size", "--cp-comm-type"
WORTH = 0.05  # share of a step that another type must save to be named

Make = Callable[[ContextParallelConfig, int], Workload]


class Sharing(NamedTuple):
    """A way to share samples, the workload with it, and the best candidate that fits."""

    way: ContextParallelConfig
    workload: Workload
    best: Estimate | None


def compared(
    found: Iterable[ContextParallelConfig],
    make: Make,
    micro_batch_size: int,
    space: SearchSpace,
    *,
    grows: bool,
) -> list[Sharing]:
    """The ways for which `make` gives a workload, those that fit first, fastest first.

    Where a micro-batch `grows`, it has up to as many times the samples as ranks share them.
    """
    sharings = []
    for way in found:
        workloads = {}
        most = way.context_parallel_size if grows else 1
        for size in (n * micro_batch_size for n in range(1, most + 1) if most % n == 0):
            try:
                workloads[size] = make(way, size)
            except UserError:  # the batch is no multiple
                continue
        if workloads:
            workload = next(iter(workloads.values()))
            own = replace(space, micro_batch_sizes=tuple(workloads))
            sharings.append(Sharing(way, workload, best_that_fits(workload, own)))
    fitting = [one for one in sharings if one.best is not None]
    least = min((_seconds(one) for one in fitting), default=0.0)

    def order(one: Sharing) -> tuple[object, ...]:
        tied = one.best is not None and _seconds(one) <= least * (1 + TIE)
        size = one.way.context_parallel_size
        return one.best is None, 0.0 if tied else _seconds(one), size

    return sorted(sharings, key=order)


def _seconds(one: Sharing) -> float:
    return 0.0 if one.best is None else one.best.seconds


def _described(flag: str, chosen: Sharing, others: Sequence[Sharing]) -> list[str]:
    """Lines about a choice among ways to share samples."""
    if chosen.best is None:
        return [f"planner: {flag} auto: {chosen.way.describe()}, which needs least: nothing fits"]
    seconds = chosen.best.seconds
    text = (
        f"planner: {flag} auto: {chosen.way.describe()}, micro-batches of "
        f"{chosen.best.candidate.micro_batch_size}: {seconds_text(seconds)} a step, the best of "
        f"{1 + len(others)} ways"
    )
    sizes = {chosen.way.context_parallel_size}
    told = []
    for one in others:
        if one.way.context_parallel_size not in sizes or flag == _TYPE:
            sizes.add(one.way.context_parallel_size)
            more = "does not fit" if one.best is None else f"{_seconds(one) / seconds - 1:.1%} more"
            told.append(f"{one.way.describe()}: {more}")
    return [text, f"planner: {'; '.join(told)}"] if told else [text]


def asked(args: Namespace) -> str | None:
    """The flag that says auto, the number of ranks first; None if neither does."""
    if args.context_parallel_size == AUTO:
        return _SIZE
    return _TYPE if {*args.cp_comm_type} == {AUTO} else None


def types_asked(
    args: Namespace, model: LlamaConfig, device_type: str, compute: str
) -> Sequence[str]:
    """The types among which the flags let choose, of those that this model's attention can do."""
    given = TYPES if {*args.cp_comm_type} == {AUTO} else (take_context(args).cp_comm_type,)
    return usable_types(given, model, device_type, compute)


def ways_asked(
    args: Namespace, types: Sequence[str], limits: ContextLimits
) -> list[ContextParallelConfig]:
    """Those among which the flags let choose, of these types."""
    sizes: Sequence[int] = (args.context_parallel_size,)
    if args.context_parallel_size == AUTO:
        sizes = [n for n in range(1, limits.world_size + 1) if limits.world_size % n == 0]
    return [*ways(take_context(args), sizes, types, limits)]


def choose(
    flag: str,
    found: Sequence[ContextParallelConfig],
    make: Make,
    micro_batch_size: int,
    space: SearchSpace,
) -> tuple[dict[str, object], tuple[str, ...]]:
    """The arguments of the best way and its micro-batch, and log lines.

    If nothing fits, of the way that needs least memory. `UserError` if the batch fits no way.
    """
    sharings = compared(found, make, micro_batch_size, space, grows=flag == _SIZE)
    if not sharings:
        make(found[0], micro_batch_size)  # says why
    chosen, *others = sharings
    if chosen.best is None:
        chosen = min(sharings, key=lambda one: _least_bytes(one.workload, space))
    else:
        micro_batch_size = chosen.best.candidate.micro_batch_size
    fields = chosen.way.flags | {"micro_batch_size": micro_batch_size}
    return fields, tuple(_described(flag, chosen, others))


def _least_bytes(workload: Workload, space: SearchSpace) -> int:
    (strategy, *_) = space.strategies or (workload.strategy("GGG"),)
    return Estimator(workload).memory(workload.candidate(strategy)).total


def faster_type(given: ContextParallelConfig, workload: Workload, strategy: Strategy) -> str | None:
    """The flags of another type if a step is predicted to be clearly faster with it, and fits."""
    candidate = workload.candidate(strategy)
    own = Estimator(workload).estimate(candidate).seconds
    least, fastest = own / (1 + WORTH), None
    model, compute = workload.model, workload.precision.compute
    any_sizes = replace(given, hierarchical_context_parallel_sizes=None)
    types = usable_types(TYPES, model, workload.device_type, compute)
    for way in ways(any_sizes, [given.context_parallel_size], types, workload.context_limits):
        estimator = Estimator(replace(workload, context=way.layout))
        if estimator.costs(candidate).least_seconds() < least:
            estimate = estimator.estimate(candidate)
            if estimate.fits and estimate.seconds < least:
                least, fastest = estimate.seconds, way
    if fastest is None:
        return None
    return f"{fastest.flag_text} would be {own / least - 1:.0%} faster, as the planner predicts"
