"""The longest sequence that fits a device, by strategy and number of ranks that share a sample."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace

from paro.config.context_parallel import AUTO, ContextParallelConfig, take_context, ways
from paro.config.context_search import types_asked
from paro.planning.search.estimator import Estimate, Estimator
from paro.planning.search.search_space import Workload, recompute_text
from paro.strategy import Strategy, legal_letters
from paro.text import align
from tools.planning.workload import case_of

_STEP = 1024  # tokens, to a multiple of which lengths are rounded down
_NEAR = 0.01  # share of a length up to which it is found
_HEADS = (
    *("strategy", "ranks a sample", "type", "recomputation"),
    *("longest", "tokens/s", "MFU", "waits for tokens"),
)


def longest_table(args: Namespace) -> str:
    """A row for every strategy and number of ranks with the type that allows most tokens.

    Types are those of --cp-comm-type. A step has one micro-batch of one sample.
    """
    fields = {**ContextParallelConfig().flags, "global_batch_size": None, "micro_batch_size": 1}
    workload = case_of(Namespace(**vars(args) | fields))
    types = types_asked(args, workload.model, workload.device_type, workload.precision.compute)
    rows: list[tuple[str, ...]] = [_HEADS]
    for name, strategy in _strategies(workload):
        for size in _sizes(args, workload):
            limits = replace(workload.context_limits, seq_length=_unit(size))
            found = [
                (way, length)
                for way in ways(take_context(args), [size], types, limits)
                if (length := _longest(workload, way, strategy))
            ]
            if found:
                way, length = max(found, key=lambda one: one[1])
                own = _at(workload, way, length)
                estimate = Estimator(own).estimate(own.candidate(strategy))
                rows.append((name, *_cells(way, length, estimate)))
    return align(rows, left=(0, 2, 3))


def _strategies(workload: Workload) -> Iterator[tuple[str, Strategy]]:
    """Those of different degrees, with all their letters."""
    found: dict[tuple[int, ...], list[Strategy]] = {}
    for strategy in map(workload.strategy, legal_letters()):
        if workload.infeasible_reason(strategy, workload.materialize) is None:
            found.setdefault(strategy.degrees, []).append(strategy)
    for alike in found.values():
        yield "=".join(one.name for one in alike), alike[0]


def _sizes(args: Namespace, workload: Workload) -> list[int]:
    """The number of ranks that is given, or 1 and all that divide the world."""
    if args.context_parallel_size not in (1, AUTO):
        return [args.context_parallel_size]
    return [n for n in range(1, workload.world_size + 1) if workload.world_size % n == 0]


def _unit(size: int) -> int:
    return math.lcm(_STEP, 2 * size)


def _longest(workload: Workload, way: ContextParallelConfig, strategy: Strategy) -> int:
    """The most tokens that fit; 0 if none do."""
    unit = _unit(way.context_parallel_size)

    def fits(count: int) -> bool:
        own = _at(workload, way, count * unit)
        return Estimator(own).memory(own.candidate(strategy)).total <= own.device_bytes

    return unit * _most(fits)


def _most(fits: Callable[[int], bool]) -> int:
    """The largest number up to which `fits` holds, or up to `_NEAR` of it less."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(1, _NEAR * low):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _at(workload: Workload, way: ContextParallelConfig, length: int) -> Workload:
    return replace(
        workload,
        model=replace(workload.model, max_position_embeddings=length),
        context=way.layout,
        seq_length=length,
        global_batch_size=workload.world_size // way.context_parallel_size,
    )


def _cells(way: ContextParallelConfig, length: int, estimate: Estimate) -> tuple[str, ...]:
    sizes = way.hierarchical_context_parallel_sizes
    kind = way.cp_comm_type if sizes is None else f"{way.cp_comm_type} {sizes[0]} x {sizes[1]}"
    return (
        str(way.context_parallel_size),
        "" if way.context_parallel_size == 1 else kind,
        recompute_text(estimate.candidate.recompute),
        f"{length:,}",
        f"{estimate.tokens_per_second:,.0f}",
        f"{estimate.mfu:.1%}",
        f"{estimate.timeline.exposed['context'] / estimate.seconds:.1%}",
    )
