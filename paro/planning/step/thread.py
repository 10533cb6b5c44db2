"""Simulated training thread: carries out the actions of a step with their costs."""

# The list of actions (step/plan.py) goes from one point at which all communication streams are
# empty (gradients are complete, their norm is known) to the next. So it begins with the update,
# unit by unit, each queueing the all-gather of its updated parameters; then the micro-batches, the
# first of which waits for these all-gathers; then the wait for the last reductions and the
# all-reduce of the norm. Where communication does not overlap, what is queued is waited for.

from __future__ import annotations

from collections.abc import Callable

from paro.planning.cost_model import UnitSize
from paro.planning.machine.collective_time import ParallelJobs, StreamAxes, TimedJob, scalar_seconds
from paro.planning.machine.machine import GroupSpeed
from paro.planning.step.comm_costs import UnitCommCosts
from paro.planning.step.computing import UnitSeconds
from paro.planning.step.costs import StepCosts
from paro.planning.step.simulation import Actor, Compute, Program, Simulation, Wait, Work, Works
from paro.step.actions import Verb


class BufferWork:
    """A flat buffer of a unit, and its work in flight."""

    def __init__(self, size: UnitSize, costs: UnitCommCosts) -> None:
        self.name = size.name if costs.trainable else f"{size.name} (frozen)"
        self.size = size
        self.costs = costs
        self.gathered: Works = ()
        self.updated: Works = ()  # the all-gather of its updated parameters
        self.read: Works = ()  # done when the whole gradient has been read
        self.reduced: Works = ()


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
        self.buffers = [
            BufferWork(unit, own)
            for unit, parts in zip(costs.comm_costs.units, costs.comm_costs.per_unit, strict=True)
            for own in parts
        ]
        self._carried_out: dict[Verb, Callable[..., Program]] = {
            Verb.GATHER: self._gather,
            Verb.WAIT: self._wait,
            Verb.RELEASE: self._release,
            Verb.FREE: self._free,
            Verb.REDUCE: self._reduce,
            Verb.STEP_REDUCE: self._step_reduce,
            Verb.WAIT_REDUCED: self._wait_reduced,
            Verb.NORM: self._norm,
            Verb.UPDATE: self._update,
            Verb.GATHER_UPDATED: self._gather_updated,
            Verb.FORWARD: self._forward,
            Verb.LOSS: self._loss,
            Verb.RECOMPUTE: self._recompute,
            Verb.BACKWARD: self._backward,
            Verb.GRADIENTS: self._gradients,
        }

    def program(self) -> Program:
        yield self._compute(self.costs.device.step_seconds, "step", "other")
        for action in self.costs.plan.actions():
            carried_out = self._carried_out.get(action[0])
            if carried_out is not None:
                yield from carried_out(*action[1:])

    # Compute #

    def _update(self, number: int) -> Program:
        buffer, costs = self.buffers[number], self.costs
        seconds = costs.update_seconds(buffer.size.trainable_numel)
        seconds += costs.computing.coding_seconds(buffer.costs.encoded_bytes)
        yield self._compute(seconds, f"update {buffer.size.name}", "update")

    def _forward(self, index: int) -> Program:
        name, seconds = self._unit(index)
        rest = seconds.loss if index in self.costs.shape.grads_in_forward else 0.0
        yield self._compute(seconds.forward - rest, f"forward {name}", "forward")

    def _loss(self, index: int) -> Program:
        name, seconds = self._unit(index)
        yield self._compute(seconds.loss, f"forward {name}", "forward")

    def _recompute(self, index: int) -> Program:
        name, seconds = self._unit(index)
        yield self._compute(seconds.recompute, f"recompute {name}", "recompute")

    def _backward(self, index: int) -> Program:
        name, seconds = self._unit(index)
        yield self._compute(seconds.until_first_gradient, f"backward {name}", "backward")

    def _gradients(self, index: int) -> Program:
        name, seconds = self._unit(index)
        numel = self.costs.comm_costs.units[index].trainable_numel
        rest = seconds.rest_of_backward + self.costs.collect_seconds(numel)
        yield self._compute(rest, f"backward {name}", "backward")

    def _unit(self, index: int) -> tuple[str, UnitSeconds]:
        return self.costs.comm_costs.units[index].name, self.costs.computing.per_unit[index]

    # Parameters #

    def _gather(self, number: int) -> Program:
        buffer = self.buffers[number]
        name, phases = f"gather {buffer.name}", buffer.costs.gather
        buffer.gathered = self._queue("gather", "gather", name, phases, buffer.updated)
        yield from self._wait_unless_overlapped(buffer.gathered)

    def _wait(self, number: int) -> Program:
        buffer = self.buffers[number]
        yield Wait(buffer.gathered or buffer.updated)
        buffer.gathered = buffer.updated = ()

    def _release(self, number: int) -> Program:
        buffer = self.buffers[number]
        yield Wait(buffer.gathered)
        buffer.gathered = ()

    def _gather_updated(self, number: int) -> Program:
        buffer = self.buffers[number]
        phases = buffer.costs.gather_updated
        works = self._queue("gather", "publish", f"publish {buffer.name}", phases)
        if buffer.costs.decoded_bytes:
            name, stream = f"decode {buffer.name}", phases[0][0].stream
            works = self._code(name, stream, buffer.costs.decoded_bytes, works)
        buffer.updated = works
        yield from self._wait_unless_overlapped(works)

    # Gradients #

    def _reduce(self, number: int) -> Program:
        buffer = self.buffers[number]
        costs, works = buffer.costs, Works()
        if costs.reduce:
            works = self._queue("reduce", "reduce", f"reduce {buffer.name}", costs.reduce)
            stream = costs.reduce[-1][-1].stream
            works = self._copy(f"add {buffer.name}", stream, costs.accumulated_bytes, works)
            buffer.read = works
            yield from self._wait_unless_overlapped(works)
        buffer.reduced = works

    def _free(self, number: int) -> Program:
        yield Wait(self.buffers[number].read)

    def _wait_reduced(self, number: int) -> Program:
        yield Wait(self.buffers[number].reduced)
        self.buffers[number].reduced = ()

    def _norm(self, _number: int) -> Program:
        seconds = scalar_seconds(self.costs.machine)
        job = TimedJob(stream=(), seconds=seconds, intra=0.0, inter=0.0, cpu=0.0)
        yield Wait(self._queue("agree", "agree", "norm", ((job,),), joins=True))

    def _step_reduce(self, number: int) -> Program:
        """Queues the step's gradient reduce-scatter and replica all-reduce."""
        buffer = self.buffers[number]
        costs, after = buffer.costs, buffer.reduced
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
        job = TimedJob(stream=stream, seconds=seconds, intra=0.0, inter=0.0, cpu=busy)
        return self._queue("reduce", "reduce", name, ((job,),), after)

    def _queue(
        self,
        use: str,
        kind: str,
        name: str,
        phases: tuple[ParallelJobs, ...],
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
