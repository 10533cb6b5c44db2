"""The configuration of context parallelism, from its flags or, for auto, from the planner."""

# A ContextParallelConfig says how many ranks share a sample, and by which of Megatron-LM's types:
# p2p (ring attention), allgather (of keys and values), a2a (Ulysses: an all-to-all exchanges tokens
# for heads) or a2a+p2p (a2a inside sets of ranks, p2p between sets). Where --context-parallel-size
# or --cp-comm-type says auto, paro/config/resolve.py calls `possible_configs`, which lists every
# configuration that fits the ranks, the heads and the sequence length, and `fastest_config`, which
# has the planner search each of them for the fastest step; in a tie, the lowest degree.
#
# With degree C, the same ranks and the same global batch, a step has C times as many micro-batches,
# and a micro-batch takes less memory of a rank. So with --context-parallel-size auto, micro-batches
# of up to C times as many samples are candidates too.

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from paro.distributed.world import World
from paro.errors import UserError, check_least, contradiction
from paro.planning.description import seconds_text
from paro.planning.estimator import Estimator
from paro.planning.planner import TIE, best_by_context
from paro.planning.search_space import PlanRequest, SearchSpace
from paro.spec.context_layout import COMM_TYPES, SIZE_FLAG, SIZES_FLAG, TYPE_FLAG, ContextLayout
from paro.spec.run_spec import ContextLimits
from paro.strategy import Strategy
from paro.text import listed
from paro.topology import divisors

AUTO = "auto"
_CLEAR_GAIN = 0.05  # share of a step that another type must save for the log to suggest it

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallelConfig:
    """The context-parallel degree and communication type, and the flags left to the planner."""

    context_parallel_size: int = 1
    cp_comm_type: str = "p2p"
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = None
    context_ring: str = "double"  # p2p between groups: "double", two nested rings, or "flat", one
    auto: tuple[str, ...] = ()  # flags that leave the choice open; until then degree 1, type p2p

    def __post_init__(self) -> None:
        size, sizes = self.context_parallel_size, self.hierarchical_context_parallel_sizes
        sizes_text = " ".join([SIZES_FLAG, *map(str, sizes or ())])
        check_least(1, context_parallel_size=size)
        if size == 1 and sizes is not None:
            product = math.prod(sizes)
            also = f"give {SIZE_FLAG} {product} too, or " * (product > 1)
            raise UserError(
                f"{sizes_text} divides the ranks that share a sample, and "
                f"without {SIZE_FLAG} above 1 none do: {also}leave it out"
            )
        if size > 1 and sizes is None and self.cp_comm_type == "a2a+p2p":
            raise UserError(
                f"{TYPE_FLAG} a2a+p2p needs {SIZES_FLAG}: first the ranks that exchange heads, "
                f"then those that keys and values go round, such as {SIZES_FLAG} 2 {size // 2}"
            )
        if sizes is not None and self.cp_comm_type not in ("a2a+p2p", "p2p"):
            raise UserError(f"{sizes_text} is for {TYPE_FLAG} p2p and a2a+p2p: leave it out")
        if sizes is not None and (len(sizes) != 2 or min(sizes) < 1 or math.prod(sizes) != size):
            raise UserError(f"{sizes_text} must be two sizes whose product is {SIZE_FLAG} {size}")

    @property
    def layout(self) -> ContextLayout:
        """The division of a sample's tokens and heads among ranks, by degree and type."""
        return self._layout_at(self.context_parallel_size)

    def _layout_at(self, degree: int) -> ContextLayout:
        first, *_ = self.hierarchical_context_parallel_sizes or (0,)
        is_flat = self.context_ring == "flat"
        return ContextLayout.of_type(self.cp_comm_type, degree, first=first, flat=is_flat)

    def reason_invalid(self, limits: ContextLimits, degree: int) -> str | None:
        """Say why ranks, heads or sequence length forbid a degree; None if they allow it."""
        sizes = self.hierarchical_context_parallel_sizes
        if sizes is not None and degree % sizes[0]:
            return f"{sizes[0]} ranks do not divide it"
        return limits.reason_invalid(self._layout_at(degree))

    def check(self, limits: ContextLimits) -> None:
        """Raise `UserError` unless this configuration fits the limits; name degrees that fit."""
        degree = self.context_parallel_size
        if (reason := self.reason_invalid(limits, degree)) is None:
            return
        if reason == limits.no_log_sum_exp:
            raise UserError(f"{reason}, or {TYPE_FLAG} a2a")
        degrees = range(1, limits.most + 1)
        fitting = [str(each) for each in degrees if not self.reason_invalid(limits, each)]
        advice = f"give other {SIZES_FLAG}"
        if fitting:
            advice = f"choose {'one of ' * (len(fitting) > 1)}{listed(fitting)}"
        if self.layout.heads > 1 and limits.reason_invalid(ContextLayout(size=degree)) is None:
            advice += f", or {TYPE_FLAG} p2p, which exchanges no heads"
        raise UserError(f"{SIZE_FLAG} {degree} does not fit: {reason}: {advice}")

    def describe(self) -> str:
        """Describe in words how many ranks share a sample, and by which type."""
        if self.context_parallel_size == 1:
            return "no ranks share a sample"
        sizes = self.hierarchical_context_parallel_sizes
        over = "" if sizes is None else f" over {' x '.join(map(str, sizes))}"
        return f"{self.context_parallel_size} ranks share a sample by {self.cp_comm_type}{over}"

    @property
    def flags(self) -> dict[str, object]:
        """The arguments that select the degree and the type."""
        sizes = self.hierarchical_context_parallel_sizes
        return {
            "context_parallel_size": self.context_parallel_size,
            "cp_comm_type": [self.cp_comm_type],
            "hierarchical_context_parallel_sizes": None if sizes is None else [*sizes],
        }


def take_context(args: Namespace) -> ContextParallelConfig:
    """Build the configuration from the flags."""
    types = args.cp_comm_type
    if len(set(types)) > 1:
        raise UserError(f"{TYPE_FLAG} {' '.join(types)}: all blocks have one: give it once")
    size, sizes = args.context_parallel_size, args.hierarchical_context_parallel_sizes
    flags = {SIZE_FLAG: size, TYPE_FLAG: types[0]}
    auto = tuple(flag for flag, value in flags.items() if value == AUTO)
    if auto and sizes is not None:
        given = " ".join([SIZES_FLAG, *map(str, sizes)])
        raise contradiction(given, f"{auto[0]} {AUTO}", "auto chooses the sizes too")
    return ContextParallelConfig(
        context_parallel_size=1 if SIZE_FLAG in auto else size,
        cp_comm_type="p2p" if TYPE_FLAG in auto else types[0],
        hierarchical_context_parallel_sizes=None if sizes is None else tuple(sizes),
        context_ring=args.paro_context_ring,
        auto=auto,
    )


def data_parallel_size_of(world: World, degree: int | str) -> int:
    """Count data-parallel ranks: world size / context-parallel degree; `UserError` if not whole.

    While the degree is auto the count is 1, which divides every batch size.
    """
    if isinstance(degree, str):
        return 1
    if degree < 1 or world.size % degree:
        raise UserError(
            f"{SIZE_FLAG} {degree} does not divide the {world.size} ranks: choose one of "
            f"{', '.join(map(str, divisors(world.size)))}"
        )
    return world.size // degree


# What auto chooses


def possible_configs(
    base: ContextParallelConfig, limits: ContextLimits, degrees: Sequence[int] = ()
) -> Iterator[ContextParallelConfig]:
    """Yield each choice of what is left open that fits the limits, or only those of `degrees`.

    a2a+p2p is yielded with each split inside a group.
    """
    types = COMM_TYPES if TYPE_FLAG in base.auto else (base.cp_comm_type,)
    if not degrees and SIZE_FLAG in base.auto:
        degrees = [n for n in divisors(limits.world_size) if n <= limits.most]
    for degree in degrees or [base.context_parallel_size]:
        for name in types if degree > 1 else ["p2p"]:
            splits: list[tuple[int, ...] | None] = [base.hierarchical_context_parallel_sizes]
            if name == "a2a+p2p" and splits == [None]:
                inside = (n for n in range(2, degree // 2 + 1) if limits.run.group_size % n == 0)
                splits = [(n, degree // n) for n in inside if degree % n == 0]
            for split in splits:
                config = replace(
                    base,
                    context_parallel_size=degree,
                    cp_comm_type=name,
                    hierarchical_context_parallel_sizes=split,
                    auto=(),
                )
                if config.reason_invalid(limits, degree) is None:
                    yield config


def preferred_config(
    configs: Iterable[ContextParallelConfig], group_size: int
) -> ContextParallelConfig:
    """Pick without timings: prefer exchanging heads inside a group, among the most ranks."""

    def order(config: ContextParallelConfig) -> tuple[bool, bool, int]:
        layout = config.layout
        return not layout.gathers, layout.heads <= group_size, layout.heads

    return max(configs, key=order)


def with_micro_batches(
    configs: Sequence[ContextParallelConfig],
    micro_batch_size: int,
    make: Callable[[ContextParallelConfig, int], T],
    *,
    grows: bool,
) -> dict[tuple[ContextParallelConfig, int], T]:
    """Map each configuration and possible micro-batch size to `make(config, size)`.

    With `grows`, sizes are micro_batch_size times each divisor of the context-parallel degree.
    `UserError` if the global batch is a multiple of no size.
    """
    made = {}
    for config in configs:
        for factor in divisors(config.context_parallel_size) if grows else [1]:
            size = factor * micro_batch_size
            with suppress(UserError):  # the global batch is not a multiple of this size
                made[config, size] = make(config, size)
    first = configs[0], micro_batch_size
    return made or {first: make(*first)}  # raises the error


def fastest_config(
    flag: str,
    request: PlanRequest,
    candidates: Iterable[tuple[ContextParallelConfig, int]],
    space: SearchSpace,
) -> tuple[ContextParallelConfig, int, tuple[str, ...]]:
    """Pick the configuration and micro-batch size with the planner's fastest step; add log lines.

    If no candidate fits the memory, return the configuration that needs the least memory.
    """
    pairs = [*candidates]
    space = replace(space, contexts=tuple((config.layout, size) for config, size in pairs))
    best = best_by_context(request, space)
    seconds = {
        config: estimate.seconds if (estimate := best[config.layout]) else math.inf
        for config, _ in pairs
    }
    least = min(seconds.values())

    def order(config: ContextParallelConfig) -> tuple[float, int]:
        tied = seconds[config] <= least * (1 + TIE)
        return 0.0 if tied else seconds[config], config.context_parallel_size

    config, *others = sorted(seconds, key=order)
    if (fastest := best[config.layout]) is None:
        (strategy, *_) = space.strategies or (request.strategy("GGG"),)
        candidate, estimator = request.candidate(strategy), Estimator(request)
        config = min(
            (config, *others),
            key=lambda each: estimator.memory(replace(candidate, context=each.layout)).total,
        )
        line = f"planner: {flag} auto: {config.describe()}, which needs least: nothing fits"
        return config, request.micro_batch_size, (line,)
    size = fastest.candidate.micro_batch_size
    line = (
        f"planner: {flag} auto: {config.describe()}, micro-batches of {size}: "
        f"{seconds_text(fastest.seconds)} a step, the best of {len(seconds)} ways"
    )
    degrees, compared = {config.context_parallel_size}, []
    for other in others:
        if other.context_parallel_size not in degrees or flag == TYPE_FLAG:
            degrees.add(other.context_parallel_size)
            more = f"{seconds[other] / fastest.seconds - 1:.1%} more"
            compared.append(f"{other.describe()}: {more if best[other.layout] else 'does not fit'}")
    return config, size, (line, f"planner: {'; '.join(compared)}") if compared else (line,)


def faster_comm_type(
    config: ContextParallelConfig, estimator: Estimator, strategy: Strategy
) -> str | None:
    """Name the flags of another type whose step is predicted to be clearly faster, if any."""
    request, candidate = estimator.request, estimator.request.candidate(strategy)
    seconds = estimator.estimate(candidate).seconds
    least, fastest = seconds / (1 + _CLEAR_GAIN), None
    base = replace(config, cp_comm_type="p2p", hierarchical_context_parallel_sizes=None)
    limits = ContextLimits(request, request.world_size)
    for other in possible_configs(replace(base, auto=(TYPE_FLAG,)), limits):
        changed = replace(candidate, context=other.layout)
        if estimator.costs(changed).least_seconds() < least:
            estimate = estimator.estimate(changed)
            if estimate.fits and estimate.seconds < least:
                least, fastest = estimate.seconds, other
    if fastest is None:
        return None
    gain = f"{seconds / least - 1:.0%}"
    return f"{fastest.layout.type_flags} would be {gain} faster, as the planner predicts"
