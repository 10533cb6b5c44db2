"""Advice if nothing fits: the least memory, and single changes that would be enough."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace

from model.config import LlamaConfig, RecomputeConfig
from paro.planning.search.estimator import Estimator
from paro.planning.search.planner import SearchResult
from paro.planning.search.search_space import Candidate, Materialize, Workload
from paro.text import size_text

MOST_RANKS = 16384  # the largest world size that is tried
_SMALLER = {
    Materialize.GATHER: (Materialize.ROTATE, "--paro-materialize rotate"),
    Materialize.ROTATE: (Materialize.ROTATE_IN_PLACE, "--paro-rotate-in-place"),
}


def why_nothing_fits(workload: Workload, plan: SearchResult) -> str:
    """One line: the least memory, and each single change that would make it fit."""
    least = plan.least
    changes = "; or ".join(single_changes(workload, least.candidate))
    return (
        f"nothing fits the {plan.device_bytes / 1e9:g} GB of a device: the least is "
        f"{size_text(least.memory_bytes)} with {least.candidate.describe()} "
        f"({least.memory.describe()}); use larger devices{changes and f'; or {changes}'}"
    )


def single_changes(workload: Workload, least: Candidate) -> Iterator[str]:
    """Flags, and a number of ranks, each of which would be enough alone."""
    if workload.prefetch_units and _fits(replace(workload, prefetch_units=0), least):
        yield "--paro-prefetch-units 0"
    recompute = least_recomputation(
        replace(workload.model, recompute=least.recompute),
        lambda recompute: _fits(workload, replace(least, recompute=recompute)),
    )
    if recompute is not None:
        yield recompute_flags(recompute)
    if least.micro_batch_size > 1:
        size = _largest_micro_batch(workload, least)
        if size is not None:
            yield f"--micro-batch-size {size}"
    yield from _smaller_way(workload, least)
    ranks = _fewest_ranks(workload, least)
    if ranks is not None:
        how = ", gathered" if least.materialize.rotates else ""
        yield f"{ranks} ranks, with all states spread over all of them{how}"


def least_recomputation(
    model: LlamaConfig, fits: Callable[[RecomputeConfig], bool]
) -> RecomputeConfig | None:
    """The fewest first blocks whose recomputation makes it fit; None if even all are too few."""
    given, fewest, most = model.recompute, 1, model.num_layers
    if given is not None and given.granularity == "full":
        if given.method == "uniform":
            return None
        fewest = given.num_layers + 1

    def first(count: int) -> RecomputeConfig:
        if count == most:
            return RecomputeConfig(granularity="full")
        return RecomputeConfig(granularity="full", method="block", num_layers=count)

    counts = range(fewest, most + 1)  # the more, the less memory
    found = bisect_left(counts, True, key=lambda count: fits(first(count)))
    return first(counts[found]) if found < len(counts) else None


def recompute_flags(recompute: RecomputeConfig) -> str:
    """The flags that select it."""
    text = f"--recompute-granularity {recompute.granularity}"
    if recompute.method == "uniform":
        return text
    return f"{text} --recompute-method block --recompute-num-layers {recompute.num_layers}"


def _smaller_way(workload: Workload, least: Candidate) -> Iterator[str]:
    """The flag that makes weights rotate, or rotate in place, if that is enough."""
    further = _SMALLER.get(least.materialize)
    if further is not None:
        materialize, flag = further
        possible = workload.infeasible_reason(least.strategy, materialize) is None
        if possible and _fits(workload, replace(least, materialize=materialize)):
            yield flag


def _fits(workload: Workload, candidate: Candidate) -> bool:
    return Estimator(workload).memory(candidate).total <= workload.device_bytes


def _largest_micro_batch(workload: Workload, least: Candidate) -> int | None:
    """The largest smaller size that fits and divides the given one, and so the batch."""
    given = least.micro_batch_size
    sizes = (size for size in range(given - 1, 0, -1) if given % size == 0)
    return next((s for s in sizes if _fits(workload, replace(least, micro_batch_size=s))), None)


def _fewest_ranks(workload: Workload, least: Candidate) -> int | None:
    """The fewest that fit, by doubling at the same batch per rank; None: unknown, or too many.

    Unknown where collectives were measured: measurements hold only for their own ranks.
    """
    if workload.machine.measured:
        return None
    ranks, batch = 2 * workload.world_size, 2 * workload.global_batch_size
    while ranks <= MOST_RANKS:
        more = replace(
            workload,
            machine=replace(workload.machine, uneven=()).for_world(ranks, subject="more ranks"),
            global_batch_size=batch,
        )
        everywhere = more.strategy(f"{ranks},{ranks},{ranks}")
        if _fits(more, replace(least, strategy=everywhere, materialize=Materialize.GATHER)):
            return ranks
        ranks, batch = 2 * ranks, 2 * batch
    return None
