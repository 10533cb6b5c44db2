"""What would do where nothing fits: the least memory, and the changes that would be enough."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from model.config import RecomputeConfig
from paro.planning.search.planner import Estimator, Plan
from paro.planning.search.settings import Case, Materialize, Setting

MOST_RANKS = 16384  # as far as more of them are tried
_SMALLER = {
    Materialize.GATHER: (Materialize.ROTATE, "--paro-materialize rotate"),
    Materialize.ROTATE: (Materialize.ROTATE_IN_PLACE, "--paro-rotate-in-place"),
}


def why_nothing_fits(case: Case, plan: Plan) -> str:
    """One line: what is the least, and each single change that would make it fit."""
    least = plan.least
    changes = "; or ".join(_changes(case, least.setting))
    return (
        f"nothing fits the {plan.limit.describe()}: the least is "
        f"{least.memory_bytes / 1e9:.1f} GB with {least.setting.describe()} "
        f"({least.memory.describe()}); use larger devices{changes and f'; or {changes}'}"
    )


def _changes(case: Case, least: Setting) -> Iterator[str]:
    """Flags, and a number of ranks, that would be enough by themselves."""
    if case.prefetch_units and _fits(replace(case, prefetch_units=0), least):
        yield "--paro-prefetch-units 0"
    full = RecomputeConfig(granularity="full")
    whole = least.recompute is not None and least.recompute.granularity == "full"
    if not whole and _fits(case, replace(least, recompute=full)):
        yield "--recompute-granularity full"
    if least.micro_batch_size > 1:
        size = _largest_micro_batch(case, least)
        if size is not None:
            yield f"--micro-batch-size {size}"
    yield from _smaller_way(case, least)
    ranks = _fewest_ranks(case, least)
    if ranks is not None:
        how = ", gathered" if least.materialize.rotates else ""
        yield f"{ranks} ranks, with all states spread over all of them{how}"


def _smaller_way(case: Case, least: Setting) -> Iterator[str]:
    """The flag with which weights rotate, or rotate in place."""
    further = _SMALLER.get(least.materialize)
    if further is not None:
        materialize, flag = further
        possible = case.why_not(least.strategy, materialize) is None
        if possible and _fits(case, replace(least, materialize=materialize)):
            yield flag


def _fits(case: Case, setting: Setting) -> bool:
    return Estimator(case).memory(setting).total <= case.limit.usable_bytes


def _largest_micro_batch(case: Case, least: Setting) -> int | None:
    """The largest that fits and divides the batch as the one given does."""
    given = least.micro_batch_size
    sizes = (size for size in range(given - 1, 0, -1) if given % size == 0)
    return next((s for s in sizes if _fits(case, replace(least, micro_batch_size=s))), None)


def _fewest_ranks(case: Case, least: Setting) -> int | None:
    """By doubling, each with as much of the batch as a rank has here; None: unknown, or too many.

    What was measured holds for the ranks that it was measured on.
    """
    if case.machine.measured:
        return None
    ranks = 2 * case.world_size
    while ranks <= MOST_RANKS:
        more = replace(
            case,
            machine=replace(case.machine, uneven=()).for_world(ranks, told="more ranks"),
            global_batch_size=case.global_batch_size // case.world_size * ranks,
        )
        everywhere = more.strategy(f"{ranks},{ranks},{ranks}")
        if _fits(more, replace(least, strategy=everywhere, materialize=Materialize.GATHER)):
            return ranks
        ranks *= 2
    return None
