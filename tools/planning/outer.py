"""Expected gain of outer steps, where groups train alone, over the best synchronous plan."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace

from paro.config.sharding import take_outer
from paro.machine.machine import Machine, rate_text
from paro.planning.estimator import Estimate, Estimator
from paro.planning.search_space import PlanRequest
from paro.spec.run_spec import ContextLimits
from paro.strategy import legal_letters

_SHARE = 0.05  # of a step's time that rounds may be exposed, for the number of steps that is named
_STRATEGIES = [name for name in legal_letters() if "G" not in name]


def outer_lines(args: Namespace, request: PlanRequest, best: Estimate | None) -> Iterator[str]:
    """Yield lines about --paro-outer-steps beside the `best` plan, whose ranks are synchronous.

    Of the strategies whose states stay in a group the fastest that fits, its rounds, and from which
    speed of links on it is faster.
    """
    num_groups = request.world_size // request.group_size
    outer = take_outer(args, num_groups)
    if outer is None:
        return
    alone = replace(request, outer=outer)
    steps = f"outer steps every {outer.outer_steps}"
    if reason := ContextLimits(alone, alone.world_size).reason_invalid(alone.context):
        yield f"{steps}: --context-parallel-size {alone.context.size} does not fit: {reason}"
        return
    estimator = Estimator(alone)
    rows = [estimator.estimate(alone.candidate(alone.strategy(name))) for name in _STRATEGIES]
    fitting = [row for row in rows if row.fits]
    if not fitting:
        least = min(rows, key=lambda row: row.memory_bytes)
        yield (
            f"{steps}: no strategy whose states stay in a group fits; "
            f"{least.candidate.strategy.name} needs {least.memory.describe()}"
        )
        return
    fastest = min(fitting, key=lambda row: row.seconds)
    rounds = fastest.outer_round
    assert rounds is not None, "of a request with outer steps"
    yield (
        f"{steps}: {fastest.candidate.strategy.name} takes {fastest.seconds:.3f} s a step and "
        f"{fastest.memory_bytes / 1e9:.1f} GB; a round of {rounds.seconds:.3g} s is exposed for "
        f"{rounds.exposed:.3g} s, {rounds.seconds_a_step / fastest.seconds:.1%} of the time"
    )
    yield "  the training is another one, with another loss: docs/outer-steps.md"
    if rounds.exposed:
        exposed = rounds.exposed * outer.outer_fragments / (fastest.seconds - rounds.seconds_a_step)
        num_steps = math.ceil(exposed * (1 - _SHARE) / _SHARE)
        yield f"  {num_steps} steps between rounds would expose {_SHARE:.0%}"
    if best is not None:
        gain = best.seconds / fastest.seconds
        name = best.candidate.strategy.name
        yield f"  {gain:.2f} times as fast as {name}, the best in which all ranks are synchronous"
        yield from _threshold(request, alone, best, fastest)


def _threshold(
    request: PlanRequest, alone: PlanRequest, best: Estimate, fastest: Estimate
) -> Iterator[str]:
    """Yield a line with the speed of links between groups up to which outer steps are faster."""
    machine = request.machine
    if machine.inter is None or machine.measured:
        return  # measured collectives do not change with a link's rate

    def is_faster(bits: int) -> bool:
        at = _with_links(machine, bits)
        in_step, in_rounds = (
            Estimator(replace(each, machine=at)).estimate(plan.candidate).seconds
            for each, plan in ((request, best), (alone, fastest))
        )
        return in_rounds < in_step

    low, high = 10**6, 10**13
    if not is_faster(low) or is_faster(high):
        return
    while high / low > 1.1:
        middle = math.isqrt(low * high)
        low, high = (middle, high) if is_faster(middle) else (low, middle)
    digits = 2 - len(str(low))
    rate = rate_text(round(low, digits))
    yield f"  faster where links between groups have less than about {rate}"


def _with_links(machine: Machine, bits: int) -> Machine:
    assert machine.inter is not None, "there are groups"
    return replace(machine, inter=replace(machine.inter, bandwidth=rate_text(bits)))
