"""One optimizer step in time: the engine's own order of things on streams that run side by side."""

# Micro-batches in the middle are alike: of more than four, three are simulated and the others take
# what the third adds.

from __future__ import annotations

from dataclasses import dataclass, replace

from paro.planning.machine.machine import GroupSpeed
from paro.planning.step.costs import StepCosts
from paro.planning.step.gathering_thread import GatheringThread
from paro.planning.step.rotating import RotatingCosts
from paro.planning.step.rotating_thread import RotatingThread
from paro.planning.step.simulation import Actor, Simulation, Span
from paro.planning.step.thread import StepThread

_MOST_SIMULATED = 4
EXPOSED = ("gather", "reduce", "finish", "publish", "agree")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """How long a step takes, and what of it is not computing."""

    seconds: float
    compute_seconds: float
    exposed: dict[str, float]  # seconds in which the slowest group waits, by what for
    spans: tuple[Span, ...] = ()

    @property
    def exposed_seconds(self) -> float:
        return sum(self.exposed.values())


def simulate(costs: StepCosts, *, record: bool = False) -> Timeline:
    """One step; `record` keeps what every stream did, micro-batch by micro-batch."""
    count = costs.num_micro_batches
    if record or count <= _MOST_SIMULATED:
        return _simulate(costs, record=record)
    shorter = _simulate(replace(costs, num_micro_batches=2), record=False)
    longer = _simulate(replace(costs, num_micro_batches=3), record=False)
    more = count - 3

    def extended(low: float, high: float) -> float:
        return high + more * (high - low)

    return Timeline(
        seconds=extended(shorter.seconds, longer.seconds),
        compute_seconds=extended(shorter.compute_seconds, longer.compute_seconds),
        exposed={
            kind: max(0.0, extended(shorter.exposed[kind], longer.exposed[kind]))
            for kind in longer.exposed
        },
    )


def _simulate(costs: StepCosts, *, record: bool) -> Timeline:
    speeds = _speeds(costs)
    simulation = Simulation(len(speeds), record=record)
    programs = [
        _thread(costs, simulation, actor, speed).program()
        for actor, speed in zip(simulation.actors, speeds, strict=True)
    ]
    total = simulation.run(programs)
    slowest = max(simulation.actors, key=lambda actor: sum(actor.computed.values()))
    return Timeline(
        seconds=total,
        compute_seconds=sum(slowest.computed.values()),
        exposed={kind: slowest.exposed.get(kind, 0.0) for kind in EXPOSED},
        spans=tuple(simulation.spans),
    )


def _thread(
    costs: StepCosts, simulation: Simulation, actor: Actor, speed: GroupSpeed
) -> StepThread:
    if isinstance(costs, RotatingCosts):
        return RotatingThread(costs, simulation, actor, speed)
    return GatheringThread(costs, simulation, actor, speed)


def _speeds(costs: StepCosts) -> list[GroupSpeed]:
    """One actor stands for all groups that are alike."""
    machine = costs.machine
    others = machine.num_groups - sum(part.num_groups for part in machine.uneven)
    usual = [GroupSpeed(num_groups=others)] if others else []
    return [*usual, *machine.uneven]
