"""The longest sequence that fits a device, by strategy and number of ranks that share a sample."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from paro.config.context_parallel import ContextParallelConfig, possible_configs, take_context
from paro.errors import UserError
from paro.planning.estimator import Estimate, Estimator
from paro.planning.planner import plan
from paro.planning.remedies import why_nothing_fits
from paro.planning.search_space import PlanRequest, recompute_text
from paro.spec.run_spec import ContextLimits
from paro.strategy import Strategy, legal_letters
from paro.text import align
from paro.topology import divisors
from tools.planning.request import device_flag, plan_request_of_args

_STEP = 1024  # tokens, to a multiple of which lengths are rounded down
_NEAR = 0.01  # share of a length up to which it is found
_HEADS = (
    *("strategy", "ranks a sample", "type", "recomputation"),
    *("longest", "tokens/s", "MFU", "waits for tokens"),
)


def longest_table(args: Namespace) -> str:
    """Return a row for every strategy and number of ranks with the type that allows most tokens.

    Types are given by --cp-comm-type. A step has one micro-batch of one sample. `UserError` where
    the given context-parallel size is impossible, or no sequence fits.
    """
    fields = {**ContextParallelConfig().flags, "global_batch_size": None, "micro_batch_size": 1}
    request = plan_request_of_args(Namespace(**vars(args) | fields))
    context = take_context(args)
    sizes = _sizes(context, request)
    options = [*filter(None, (_options(context, request, size) for size in sizes))]
    rows: list[tuple[str, ...]] = []
    without: list[str] = []
    for name, strategy in _strategies(request):
        lengths = [[(_longest(request, cp, strategy), cp) for cp in equal] for equal in options]
        longest = [max(each, key=lambda one: one[0]) for each in lengths]
        if not any(length for length, _ in longest):
            without.append(name)
        for length, cp in longest:
            if length:
                sized = _at(request, cp, length)
                estimate = Estimator(sized).estimate(sized.candidate(strategy))
                rows.append((name, *_cells(cp, length, estimate)))
    if not rows:
        raise UserError(f"{device_flag(args)}: {_why_none(request, options[-1])}")
    lines = [f"{name}: not even {_STEP:,} tokens fit" for name in without]
    return "\n".join([align([_HEADS, *rows], left=(0, 2, 3)), *lines])


def _options(
    context: ContextParallelConfig, request: PlanRequest, size: int
) -> list[ContextParallelConfig]:
    """Return the layouts of a context-parallel size; `UserError` if the flags ask in vain."""
    limits = ContextLimits(replace(request, seq_length=_unit(size)), request.world_size)
    configs = [*possible_configs(context, limits, [size])]
    if context.context_parallel_size == size and not configs:
        context.check(limits)
    return configs


def _why_none(request: PlanRequest, options: Sequence[ContextParallelConfig]) -> str:
    """Say how much memory the shortest sequence needs, and which changes are enough."""
    shortest = [_at(request, cp, _unit(cp.context_parallel_size)) for cp in options]
    plans = [(each, plan(each, each.as_given())) for each in shortest]
    smallest, result = min(plans, key=lambda pair: pair[1].least.memory_bytes)
    return f"with {smallest.seq_length:,} tokens {why_nothing_fits(smallest, result)}"


def _strategies(request: PlanRequest) -> Iterator[tuple[str, Strategy]]:
    """Return strategies of different degrees, with all their letters; `UserError` if none is
    possible."""
    by_degrees: dict[tuple[int, ...], list[Strategy]] = {}
    for strategy in map(request.strategy, legal_letters()):
        if request.infeasible_reason(strategy, request.materialize) is None:
            by_degrees.setdefault(strategy.degrees, []).append(strategy)
    if not by_degrees:
        reason = request.infeasible_reason(request.strategy("III"), request.materialize)
        assert reason is not None, "III is among them"
        raise UserError(reason)
    for equal in by_degrees.values():
        yield "=".join(one.name for one in equal), equal[0]


def _sizes(context: ContextParallelConfig, request: PlanRequest) -> list[int]:
    """Return the number of ranks that is given, or 1 and all that divide the world."""
    if context.context_parallel_size > 1:
        return [context.context_parallel_size]
    most = ContextLimits(request, request.world_size).most
    return [n for n in divisors(request.world_size) if n <= most]


def _unit(size: int) -> int:
    return math.lcm(_STEP, 2 * size)


def _longest(request: PlanRequest, cp: ContextParallelConfig, strategy: Strategy) -> int:
    """Return the most tokens that fit; 0 if none do."""
    unit = _unit(cp.context_parallel_size)

    def fits(count: int) -> bool:
        sized = _at(request, cp, count * unit)
        return Estimator(sized).memory(sized.candidate(strategy)).total <= sized.device_bytes

    return unit * _most(fits)


def _most(fits: Callable[[int], bool]) -> int:
    """Return the largest number up to which `fits` holds, or up to `_NEAR` of it less."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(1, _NEAR * low):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _at(request: PlanRequest, cp: ContextParallelConfig, length: int) -> PlanRequest:
    return replace(
        request,
        model=replace(request.model, max_position_embeddings=length),
        context=cp.layout,
        seq_length=length,
        global_batch_size=request.world_size // cp.context_parallel_size,
    )


def _cells(cp: ContextParallelConfig, length: int, estimate: Estimate) -> tuple[str, ...]:
    sizes = cp.hierarchical_context_parallel_sizes
    kind = cp.cp_comm_type if sizes is None else f"{cp.cp_comm_type} {sizes[0]} x {sizes[1]}"
    return (
        str(cp.context_parallel_size),
        "" if cp.context_parallel_size == 1 else kind,
        recompute_text(estimate.candidate.recompute),
        f"{length:,}",
        f"{estimate.tokens_per_second:,.0f}",
        f"{estimate.mfu:.1%}",
        f"{estimate.timeline.exposed['context'] / estimate.seconds:.1%}",
    )
