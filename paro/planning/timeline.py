"""Simulates one optimizer step: its duration and exposed communication."""

# The list of actions (step/schedule.py) goes from one point at which all communication streams are
# empty (gradients are complete, their norm is known) to the next. So it begins with the update,
# unit by unit, each queueing the all-gather of its updated parameters; then the micro-batches, the
# first of which waits for these all-gathers; then the wait for the last reductions and the
# all-reduce of the norm. Where communication does not overlap, what is queued is waited for.
#
# Micro-batches in the middle are the same: of more than four, three are simulated and each of the
# others adds as much as the third.

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from paro.machine.machine import GroupSpeed
from paro.machine.rules import Slowed
from paro.planning.simulation import Activity, Simulation
from paro.planning.step_costs import StepCosts

_MAX_SIMULATED = 4
# Of a communicator: what distributed/groups.py gives each of 8 on a GPU of 128 multiprocessors.
_CTAS, _MOST_COMMUNICATORS = 16, 8
EXPOSED = {  # kinds of exposed communication, in words
    "gather": "gathers",
    "reduce": "gradient reductions",
    "finish": "the gradient reductions at the end of a step",
    "publish": "the all-gather of updated parameters",
    "context": "attention's tokens on other ranks",
    "agree": "the gradient norm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The duration of a step, and how much of it is exposed communication."""

    seconds: float
    compute_seconds: float
    exposed: dict[str, float]  # seconds for which the slowest group waits, by kind
    activities: tuple[Activity, ...] = ()


def simulate(costs: StepCosts, *, record: bool = False) -> Timeline:
    """Simulate one step; `record` keeps the activities of all streams, for every micro-batch."""
    count = costs.num_micro_batches
    if count > _MAX_SIMULATED and not record:
        shorter, longer = (simulate(replace(costs, num_micro_batches=n)) for n in (2, 3))

        def extended(low: float, high: float) -> float:
            return high + (count - 3) * (high - low)

        return Timeline(
            seconds=extended(shorter.seconds, longer.seconds),
            compute_seconds=extended(shorter.compute_seconds, longer.compute_seconds),
            exposed={
                kind: max(0.0, extended(shorter.exposed[kind], longer.exposed[kind]))
                for kind in EXPOSED
            },
        )
    machine = costs.machine
    others = machine.num_groups - sum(part.num_groups for part in machine.uneven)
    usual = [GroupSpeed(num_groups=others)] if others else []
    # One actor stands for all groups of the same speed.
    programs = ((speed, costs.program()) for speed in (*usual, *machine.uneven))
    in_order = machine.launch_order == "implicit"
    curve = costs.device.slowed
    slowed = _slowed(curve) if curve else ()
    simulation = Simulation(programs, record=record, launches_in_order=in_order, slowed=slowed)
    total = simulation.run()
    slowest = max(simulation.actors, key=lambda actor: sum(actor.computed.values()))
    return Timeline(
        seconds=total,
        compute_seconds=sum(slowest.computed.values()),
        exposed={kind: slowest.exposed.get(kind, 0.0) for kind in EXPOSED},
        activities=tuple(simulation.activities),
    )


def _slowed(curve: Slowed) -> list[float]:
    """How many times as long computing takes during no collective, during one and so on.

    Between points of the curve it is a line, beyond the last as there.
    """
    points = [(0, 1.0), *sorted(curve)]

    def at(ctas: int) -> float:
        lines = (line for line in pairwise(points) if ctas <= line[1][0])
        (low, before), (high, after) = next(lines, (points[-1], points[-1]))
        return before + (after - before) * (ctas - low) / max(1, high - low)

    return [at(number * _CTAS) for number in range(_MOST_COMMUNICATORS + 1)]
