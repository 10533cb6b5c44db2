"""Simulated training thread: the steps common to gathered and to rotated weights."""

# The program follows the sharded model and optim/optimizer.py, from one point at which all
# communication streams are empty (gradients are complete, their norm is known) to the next. So it
# begins with the update, unit by unit, each queueing the all-gather of its updated parameters; then
# the micro-batches, the first of which waits for these all-gathers; then the wait for the last
# reductions and the all-reduce of the norm.

from __future__ import annotations

from paro.planning.machine.collective_time import Job, Phase, StreamAxes, scalar_seconds
from paro.planning.machine.machine import GroupSpeed
from paro.planning.step.comm_costs import UnitCommCosts
from paro.planning.step.costs import StepCosts
from paro.planning.step.simulation import Actor, Compute, Program, Simulation, Wait, Work, Works


class Buffer:
    """A flat buffer of a unit, and its work in flight."""

    def __init__(self, unit: str, costs: UnitCommCosts) -> None:
        self.name = unit if costs.trainable else f"{unit} (frozen)"
        self.costs = costs
        self.whole = False
        self.gathered: Works = ()
        self.updated: Works = ()  # the all-gather of its updated parameters
        self.read: Works = ()  # done when the whole gradient has been read
        self.reduced: Works = ()


class StepThread:
    """The training thread of a group's ranks; a subclass defines the micro-batch."""

    def __init__(
        self, costs: StepCosts, simulation: Simulation, actor: Actor, speed: GroupSpeed
    ) -> None:
        self.costs = costs
        self.simulation = simulation
        self.actor = actor
        self.speed = speed
        self.number = 0
        self.buffers = {
            unit.name: [Buffer(unit.name, own) for own in parts]
            for unit, parts in zip(costs.comm_costs.units, costs.comm_costs.per_unit, strict=True)
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
        for unit in self.costs.comm_costs.units:
            seconds = self.costs.update_seconds(unit.trainable_numel)
            for buffer in self.buffers[unit.name]:
                seconds += self.costs.computing.coding_seconds(buffer.costs.encoded_bytes)
            yield self._compute(seconds, f"update {unit.name}", "update")
            for buffer in self.buffers[unit.name]:
                phases = buffer.costs.gather_updated
                works = self._queue("gather", "publish", f"publish {buffer.name}", phases)
                if buffer.costs.decoded_bytes:
                    name, stream = f"decode {buffer.name}", phases[0][0].stream
                    works = self._code(name, stream, buffer.costs.decoded_bytes, works)
                buffer.updated = works
                yield from self._wait_unless_overlapped(buffer.updated)

    def _finish_gradients(self) -> Program:
        for buffers in self.buffers.values():
            for buffer in buffers:
                yield Wait(buffer.reduced)
                buffer.reduced = ()
        seconds = scalar_seconds(self.costs.machine)
        job = Job(stream=(), seconds=seconds, intra=0.0, inter=0.0, cpu=0.0)
        yield Wait(self._queue("agree", "agree", "norm", ((job,),), joins=True))

    def _reduce_for_step(self, buffer: Buffer, after: Works) -> Program:
        """Queues the step's gradient reduce-scatter and replica all-reduce."""
        costs = buffer.costs
        if costs.converted_bytes:
            stream = (costs.step_reduce or costs.replicas)[0][0].stream
            after = self._copy(f"convert {buffer.name}", stream, costs.converted_bytes, after)
        if costs.coded_bytes:
            stream = (costs.step_reduce or costs.replicas)[0][0].stream
            after = self._code(f"code {buffer.name}", stream, costs.coded_bytes, after)
        phases = (*costs.step_reduce, *costs.replicas)
        buffer.reduced = self._queue("reduce", "finish", f"finish {buffer.name}", phases, after)
        yield from self._wait_unless_overlapped(buffer.reduced)

    # Work #

    def _wait_unless_overlapped(self, works: Works) -> Program:
        """Waits for work just queued where communication does not overlap with compute."""
        if not self.costs.overlaps:
            yield Wait(works)

    def _compute(self, seconds: float, name: str, kind: str) -> Compute:
        return Compute(seconds / self.speed.compute, name, kind)

    def _copy(self, name: str, stream: StreamAxes, num_bytes: int, after: Works) -> Works:
        """Queues a copy in a reduction's stream."""
        seconds = self.costs.computing.memory_seconds(num_bytes)
        return self._busy(name, stream, seconds, after)

    def _code(self, name: str, stream: StreamAxes, num_bytes: int, after: Works) -> Works:
        """Queues encoding or decoding in a reduction's stream."""
        seconds = self.costs.computing.coding_seconds(num_bytes)
        return self._busy(name, stream, seconds, after)

    def _busy(self, name: str, stream: StreamAxes, seconds: float, after: Works) -> Works:
        """Queues work in a reduction's stream; on CPU ranks it takes processor time."""
        device = self.costs.device
        busy = 1.0 if device.cores is not None else 0.0
        seconds += device.job_seconds
        job = Job(stream=stream, seconds=seconds, intra=0.0, inter=0.0, cpu=busy)
        return self._queue("reduce", "reduce", name, ((job,),), after)

    def _queue(
        self,
        use: str,
        kind: str,
        name: str,
        phases: tuple[Phase, ...],
        after: Works = (),
        *,
        joins: bool = False,
    ) -> Works:
        """Queues phases, each after the one before; with `joins` all groups take part."""
        for phase in phases:
            crosses = joins or any(job.inter for job in phase)
            works = []
            for job in phase:
                self.number += 1
                speed = self.speed.inter if job.inter else self.speed.intra if job.intra else 1.0
                work = Work(
                    name=name,
                    kind=kind,
                    job=job,
                    stream=(use, job.stream),
                    members=len(self.simulation.actors) if crosses else 1,
                    after=after,
                    left=job.seconds / speed,
                )
                works.append(self.simulation.submit(self.actor, work, self.number))
            after = tuple(works)
        return after
