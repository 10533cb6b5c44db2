"""Simulated training thread: the steps common to gathered and to rotated weights."""

# The program follows the sharded model and optim/optimizer.py, from one point at which all
# communication streams are empty (gradients are complete, their norm is known) to the next. So it
# begins with the update, unit by unit, each queueing the all-gather of its updated parameters; then
# the micro-batches, the first of which waits for these all-gathers; then the wait for the last
# reductions and the all-reduce of the norm.

from __future__ import annotations

from collections.abc import Iterator

from paro.planning.machine.collective_time import Job, Phase, StreamAxes, scalar_seconds
from paro.planning.machine.machine import GroupSpeed
from paro.planning.step.comm_costs import UnitCommCosts
from paro.planning.step.costs import StepCosts
from paro.planning.step.simulation import Actor, Compute, Program, Simulation, Wait, Work


class Buffer:
    """A flat buffer of a unit, and its work in flight."""

    def __init__(self, unit: str, moving: UnitCommCosts) -> None:
        self.name = unit if moving.trainable else f"{unit} (frozen)"
        self.moving = moving
        self.whole = False
        self.gathered: tuple[Work, ...] = ()
        self.published: tuple[Work, ...] = ()
        self.read: tuple[Work, ...] = ()  # done when the whole gradient has been read
        self.reduced: tuple[Work, ...] = ()


class StepThread:
    """The training thread of a group's ranks; a subclass defines the micro-batch."""

    def __init__(
        self, costs: StepCosts, simulation: Simulation, actor: Actor, speed: GroupSpeed
    ) -> None:
        self.costs = costs
        self.simulation = simulation
        self.actor = actor
        self.speed = speed
        self.overlaps = costs.overlaps
        self.number = 0
        self.buffers = {
            unit.name: [Buffer(unit.name, moving) for moving in parts]
            for unit, parts in zip(costs.moves.units, costs.moves.per_unit, strict=True)
        }

    def program(self) -> Program:
        costs = self.costs
        yield self._compute(costs.device.step_seconds, "step", "other")
        yield from self._update()
        for index in range(costs.num_micro_batches):
            yield from self._micro_batch(last=index + 1 == costs.num_micro_batches)
        yield from self._finish_gradients()

    def _micro_batch(self, *, last: bool) -> Program:
        raise NotImplementedError

    def _update(self) -> Program:
        for unit in self.costs.moves.units:
            seconds = self.costs.updating(unit.trainable_numel)
            yield self._compute(seconds, f"update {unit.name}", "update")
            for buffer in self.buffers[unit.name]:
                if buffer.moving.publish:
                    buffer.published = self._move(
                        "gather", "publish", buffer.name, buffer.moving.publish, ()
                    )
                    if not self.overlaps.publishing:
                        yield Wait(buffer.published)

    def _finish_gradients(self) -> Program:
        for buffers in self.buffers.values():
            for buffer in buffers:
                yield Wait(buffer.reduced)
                buffer.reduced = ()
        seconds = scalar_seconds(self.costs.machine)
        job = Job(lane=(), seconds=seconds, intra=0.0, inter=0.0, cpu=0.0)
        yield Wait(self._queue("agree", "agree", "norm", (job,), (), joins=True))

    def _finish(self, buffer: Buffer, event: tuple[Work, ...]) -> Program:
        """Queues the step's gradient reduce-scatter and replica all-reduce, after `event`."""
        moving = buffer.moving
        if moving.converted_bytes:
            lane = (moving.finish or moving.replicas)[0][0].lane
            event = self._copy(f"convert {buffer.name}", lane, moving.converted_bytes, event)
        for phases in (moving.finish, moving.replicas):
            event = self._move("reduce", "finish", buffer.name, phases, event)
        buffer.reduced = event
        if not self.overlaps.finishing:
            yield Wait(event)

    # Work #

    def _compute(self, seconds: float, name: str, kind: str) -> Compute:
        return Compute(seconds / self.speed.compute, name, kind)

    def _copy(
        self, name: str, lane: StreamAxes, num_bytes: int, after: tuple[Work, ...]
    ) -> tuple[Work, ...]:
        """Queues a copy in a reduction's stream; on CPU ranks it takes processor time."""
        busy = 1.0 if self.costs.device.cores is not None else 0.0
        seconds = self.costs.computing.memory_seconds(num_bytes)
        job = Job(lane=lane, seconds=seconds, intra=0.0, inter=0.0, cpu=busy)
        return self._queue("reduce", "reduce", name, (job,), after)

    def _move(
        self,
        use: str,
        kind: str,
        name: str,
        phases: tuple[Phase, ...],
        after: tuple[Work, ...],
    ) -> tuple[Work, ...]:
        for phase in phases:
            after = self._queue(use, kind, f"{kind} {name}", phase, after)
        return after

    def _queue(
        self,
        use: str,
        kind: str,
        name: str,
        phase: Phase,
        after: tuple[Work, ...],
        *,
        joins: bool = False,
    ) -> tuple[Work, ...]:
        return tuple(self._works(use, kind, name, phase, (after, joins)))

    def _works(
        self,
        use: str,
        kind: str,
        name: str,
        phase: Phase,
        how: tuple[tuple[Work, ...], bool],
    ) -> Iterator[Work]:
        after, joins = how
        crosses = joins or any(job.inter for job in phase)
        for job in phase:
            self.number += 1
            speed = self.speed.inter if job.inter else self.speed.intra if job.intra else 1.0
            work = Work(
                name=name,
                kind=kind,
                job=job,
                lane=(use, job.lane),
                members=len(self.simulation.actors) if crosses else 1,
                after=after,
                left=job.seconds / speed,
            )
            yield self.simulation.submit(self.actor, work, self.number)
