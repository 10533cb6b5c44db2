"""Simulates one optimizer step: its duration, exposed communication, and trace."""

# Micro-batches in the middle are the same: of more than four, three are simulated and each of the
# others adds as much as the third.

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paro.planning.machine.collective_time import TimedJob, scalar_seconds
from paro.planning.machine.machine import GroupSpeed
from paro.planning.step.comm_costs import Queued
from paro.planning.step.context import Attending
from paro.planning.step.costs import AFTER, StepCosts
from paro.planning.step.passes import QUEUES
from paro.planning.step.simulation import (
    Activity,
    Actor,
    Compute,
    Program,
    Simulation,
    Wait,
    Work,
    Works,
)
from paro.step.actions import WAITED_BY, Move, Verb

_MAX_SIMULATED = 4
EXPOSED = ("gather", "reduce", "finish", "publish", "context", "agree")
_COMPUTES = {  # the kind of time
    Verb.UPDATE: "update",
    Verb.FORWARD: "forward",
    Verb.LOSS: "forward",
    Verb.RECOMPUTE: "recompute",
    Verb.BACKWARD: "backward",
    Verb.GRADIENTS: "backward",
    Verb.REDUCE: "backward",  # of norms, where weights rotate
    Verb.SHIFT: "copy",
    Verb.SHIFT_BACK: "copy",
    Verb.SHIFT_GRADS: "copy",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The duration of a step, and how much of it is exposed communication."""

    seconds: float
    compute_seconds: float
    exposed: dict[str, float]  # seconds for which the slowest group waits, by kind
    activities: tuple[Activity, ...] = ()

    @property
    def exposed_seconds(self) -> float:
        return sum(self.exposed.values())


def simulate(costs: StepCosts, *, record: bool = False) -> Timeline:
    """Simulates one step; `record` keeps the activities of all streams, for every micro-batch."""
    count = costs.num_micro_batches
    if record or count <= _MAX_SIMULATED:
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
    in_order = costs.machine.launch_order == "implicit"
    simulation = Simulation(len(speeds), record=record, launches_in_order=in_order)
    programs = [
        StepThread(costs, simulation, actor, speed).program()
        for actor, speed in zip(simulation.actors, speeds, strict=True)
    ]
    total = simulation.run(programs)
    slowest = max(simulation.actors, key=lambda actor: sum(actor.computed.values()))
    return Timeline(
        seconds=total,
        compute_seconds=sum(slowest.computed.values()),
        exposed={kind: slowest.exposed.get(kind, 0.0) for kind in EXPOSED},
        activities=tuple(simulation.activities),
    )


def _speeds(costs: StepCosts) -> list[GroupSpeed]:
    """Speeds of the actors; one actor stands for all groups of the same speed."""
    machine = costs.machine
    others = machine.num_groups - sum(part.num_groups for part in machine.uneven)
    usual = [GroupSpeed(num_groups=others)] if others else []
    return [*usual, *machine.uneven]


# The list of actions (step/plan.py) goes from one point at which all communication streams are
# empty (gradients are complete, their norm is known) to the next. So it begins with the update,
# unit by unit, each queueing the all-gather of its updated parameters; then the micro-batches, the
# first of which waits for these all-gathers; then the wait for the last reductions and the
# all-reduce of the norm. Where communication does not overlap, what is queued is waited for.


class StepThread:
    """The training thread of a group's ranks."""

    def __init__(
        self, costs: StepCosts, simulation: Simulation, actor: Actor, speed: GroupSpeed
    ) -> None:
        self.costs = costs
        self.simulation = simulation
        self.actor = actor
        self.speed = speed
        self.number = 0
        self._queued: dict[tuple[Verb | None, int], Works] = {}  # and not waited for, by buffer

    def program(self) -> Program:
        yield Compute(self.costs.device.step_seconds / self.speed.compute, "step", "other")
        if self.costs.muon_seconds:
            seconds = self.costs.muon_seconds / self.speed.compute
            yield Compute(seconds, "Newton-Schulz", "update")
        for move in self.costs.plan.actions():
            verb, number, *_ = move
            for cause in WAITED_BY.get(verb, ()):
                yield Wait(self._queued.pop((cause, number), ()))
            if verb in QUEUES:
                works = self._queued[verb, number] = self._queue(verb, number)
                if self.costs.waits(verb):
                    yield Wait(works)
            elif verb is Verb.NORM:
                yield Wait(self._all_reduce_norm())
            if verb in _COMPUTES:
                unit, seconds = self.costs.computed(move)
                yield from self._compute(move, unit.name, seconds)

    def _compute(self, move: Move, name: str, seconds: float) -> Program:
        """Computes for an action; attention, which may wait for other ranks, is nearest the input.

        So it comes first in forward, and last in backward.
        """
        kind, context = _COMPUTES[move[0]], self.costs.context
        passes = () if context is None else context.attended(move)
        rest = seconds - sum(attention for _, attention in passes)
        of_rest = Compute(rest / self.speed.compute, f"{kind} {name}", kind)
        if move[0] is Verb.GRADIENTS or not passes:
            yield of_rest
        for attending, attention in passes:
            yield from self._attend(attending, attention, name, kind)
        if passes and move[0] is not Verb.GRADIENTS:
            yield of_rest

    def _attend(self, attending: Attending, seconds: float, name: str, kind: str) -> Program:
        """A pass over attention."""
        context = self.costs.context
        assert context is not None, "no ranks share samples"
        queued: dict[str, Works] = {}
        for stretch in context.passes[attending]:
            for key, part in stretch.queues.items():
                queued[key] = self._submit(part, f"attention {name}", ())
                if not context.overlaps:
                    yield Wait(queued[key])
            took = stretch.share * seconds / self.speed.compute
            yield Compute(took, f"{kind} {name}: attention", kind)
            for key in stretch.waits:
                yield Wait(queued[key])

    def _queue(self, verb: Verb, number: int) -> Works:
        """Queues what an action queues, each part after the one before."""
        unit, trains = self.costs.counts.buffers[number]
        name = unit.name if trains else f"{unit.name} (frozen)"
        works = self._queued.get((AFTER.get(verb), number), ())
        for part in self.costs.queued_by(number).queued.get(verb, ()):
            works = self._submit(part, f"{part.name} {name}", works)
        return works

    def _all_reduce_norm(self) -> Works:
        seconds = scalar_seconds(self.costs.machine)
        job = TimedJob(stream=(), seconds=seconds, intra=0.0, inter=0.0, cpu=0.0)
        return self._submit(Queued("norm", "agree", "agree", ((job,),)), "norm", (), joins=True)

    def _submit(self, part: Queued, name: str, after: Works, *, joins: bool = False) -> Works:
        """Submits phases, each after the one before; with `joins` all groups take part."""
        for phase in part.phases:
            crosses = joins or any(job.inter for job in phase)
            works = []
            for job in phase:
                self.number += 1
                speed = self.speed.inter if job.inter else self.speed.intra if job.intra else 1.0
                work = Work(
                    name=name,
                    kind=part.kind,
                    job=job,
                    stream=(part.use, job.stream),
                    members=len(self.simulation.actors) if crosses else 1,
                    after=after,
                    left=job.seconds / speed,
                )
                works.append(self.simulation.submit(self.actor, work, self.number))
            after = tuple(works)
        return after


def chrome_trace(activities: Sequence[Activity]) -> str:
    """The trace as JSON: a process per group, a thread per stream; times in microseconds."""
    streams = sorted({(activity.actor, activity.stream) for activity in activities})
    events: list[dict[str, object]] = []
    for number, (actor, stream) in enumerate(streams):
        name = {"name": stream}
        events.append({"ph": "M", "name": "thread_name", "pid": actor, "tid": number, "args": name})
    for actor in sorted({actor for actor, _ in streams}):
        name = {"name": f"ranks of group {actor}"}
        events.append({"ph": "M", "name": "process_name", "pid": actor, "args": name})
    for activity in activities:
        events.append(
            {
                "ph": "X",
                "name": activity.name,
                "cat": activity.kind,
                "pid": activity.actor,
                "tid": streams.index((activity.actor, activity.stream)),
                "ts": activity.start * 1e6,
                "dur": (activity.end - activity.start) * 1e6,
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"
