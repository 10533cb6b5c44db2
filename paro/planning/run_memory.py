"""Predicts what a rank of a run takes of its device, and sends, for trainer and planner."""

from __future__ import annotations

from dataclasses import replace

from paro.collectives.choice import AlgorithmChoice
from paro.distributed.byte_counter import Sent
from paro.machine.caching import cached_by
from paro.machine.choice import choice_of, pieces_by
from paro.machine.collective_time import algorithms_of
from paro.machine.machine import Machine
from paro.planning.activations import Activations
from paro.planning.context_parallel import AttentionOfBlocks, context_traffic
from paro.planning.device_memory import (
    Communication,
    DeviceMemory,
    communication_of,
    device_memory,
)
from paro.planning.passes import StepCounts
from paro.planning.rotating_activations import PartActivations
from paro.planning.sending import Sender, traffic_of
from paro.planning.tally import MemorySnapshot, StepTally
from paro.precision import BYTES_OF
from paro.spec.run_plan import RunPlan
from paro.spec.sharding_spec import ModelStateBytes, state_bytes
from paro.spec.units import shape_of_run, units_of_run
from paro.step.units import Unit


class RunMemory:
    """The memory, and the traffic, of plans that differ only in what a search chooses.

    Parts that they share are computed once.
    """

    def __init__(self, machine: Machine | None) -> None:
        self._machine = machine
        self._pieces = pieces_by(machine)

    @cached_by(
        lambda plan: (
            plan.trained,
            plan.materialize.rotates and plan.strategy.params,
            plan.materialize,
            plan.bucket_size,
        )
    )
    def units(self, plan: RunPlan) -> tuple[Unit, ...]:
        """Return the units of a plan."""
        return units_of_run(plan)

    @cached_by(lambda plan: plan.step_kind)
    def step(self, plan: RunPlan) -> StepCounts:
        """Return the actions of a step."""
        units = self.units(plan)
        shape = shape_of_run(plan, units)
        return StepCounts(shape=shape, units=units, updated_ahead=plan.updated_ahead)

    def sender(self, plan: RunPlan, rank: int | None = None) -> Sender:
        """Return a rank as it sends under a plan; None: the mean of all ranks."""
        by_nccl = plan.device_type == "cuda"
        choice = choice_of(plan.collective, self._machine, by_nccl=by_nccl)
        return Sender(group_size=plan.group_size, rank=rank, choice=choice)

    def sent(self, plan: RunPlan, num_micro_batches: int, rank: int | None = None) -> Sent:
        """Return bytes that a rank sends in a step of so many micro-batches; None: the mean
        of all."""
        step, sender = self.step(plan), self.sender(plan, rank)
        specs = plan.specs(step.units)
        states = traffic_of(step.of_step(num_micro_batches), specs, sender)
        moves = step.plan(1).actions() if plan.context.size > 1 else ()
        blocks = AttentionOfBlocks(config=plan.config, trained=plan.trained)
        attention = context_traffic(blocks, plan.batch, moves, plan.world_size, sender)
        return states + attention * num_micro_batches

    def of(self, plan: RunPlan) -> DeviceMemory:
        """At the snapshot of a step with the largest total, or of an evaluation that needs more."""
        machine, snapshot = self._machine, self._snapshot(plan)
        if plan.trained and plan.eval_micro_batch_size > plan.micro_batch_size:
            # Only then: backward needs more than forward alone.
            size = plan.eval_micro_batch_size
            forward = self._snapshot(replace(plan, trained=frozenset(), micro_batch_size=size))
            name = f"{forward.name} in an evaluation (--eval-micro-batch-size {size})"
            evaluation = forward._replace(name=name, states=snapshot.states)
            snapshot = max(snapshot, evaluation, key=lambda one: one.total)
        device = None if machine is None else machine.device
        return device_memory(snapshot, self.communication(plan), device, plan.device_type)

    def _snapshot(self, plan: RunPlan) -> MemorySnapshot:
        specs = plan.specs(self.units(plan))
        points = (now.with_copies(plan, specs) for now in self._points(plan))
        return max(points, key=lambda now: now.total)._replace(states=self._states(plan).total)

    @cached_by(lambda plan: (plan.step_kind, plan.micro_batch_size, plan.context))
    def _points(self, plan: RunPlan) -> list[MemorySnapshot]:
        return self.tally(plan).largest()

    @cached_by(lambda plan: (plan.strategy.degrees, plan.materialize, plan.trained, plan.precision))
    def _states(self, plan: RunPlan) -> ModelStateBytes:
        return state_bytes(plan.specs(self.units(plan)))

    def tally(self, plan: RunPlan) -> StepTally:
        """What is allocated while the actions of a step are carried out."""
        precision = plan.precision
        grad_dtype = precision.wire if plan.strategy.grads > 1 else precision.accumulate
        kind = PartActivations if plan.materialize.rotates else Activations
        own = kind(config=plan.config, batch=plan.batch, grad_bytes=BYTES_OF[grad_dtype])
        step = self.step(plan)
        return StepTally(run=plan, step=step, activations=[*own.of_step(step)])

    @cached_by(
        lambda plan: (
            plan.strategy.degrees,
            plan.precision,
            plan.context,
            plan.collective,
            plan.materialize,
        )
    )
    def communication(self, plan: RunPlan) -> Communication:
        """Return the process groups and buffers of a plan."""
        by_nccl = plan.device_type == "cuda"
        names: tuple[str, ...] = (plan.collective,)
        if plan.collective == "auto":
            names = algorithms_of(self._machine, by_nccl=by_nccl)
        choice = AlgorithmChoice(names=names, pieces=self._pieces if by_nccl else None)
        return communication_of(plan, plan.specs(self.units(plan)), choice)
