"""Predicts what a rank of a run takes of its device, and sends, for trainer and planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paro.distributed.byte_counter import Sent
from paro.planning.context_parallel import context_traffic
from paro.planning.cost_model import (
    UnitSize,
    in_buckets,
    merged,
    model_state_bytes,
    traffic_per_step,
)
from paro.planning.machine.choice import pieces_by
from paro.planning.machine.machine import Machine
from paro.planning.memory.device import (
    Communication,
    DeviceMemory,
    algorithms_of,
    communication_of,
    device_memory,
)
from paro.planning.memory.rotating import part_activations
from paro.planning.memory.tally import MemorySnapshot, StepTally
from paro.planning.rotation import rotation_shape
from paro.planning.run_plan import RunPlan
from paro.planning.units import activations_of, matmuls_write, shape_of, units_of
from paro.precision import BYTES_OF
from paro.step.actions import StepShape
from paro.step.rotating import RingShape
from paro.step.rotation_plan import RotationShape


def sent_per_step(
    plan: RunPlan, units: Sequence[UnitSize], num_micro_batches: int, rank: int = 0
) -> Sent:
    """Bytes sent in a step of so many micro-batches: states of the plan's units, and attention."""
    topology, precision = plan.topology, plan.precision
    states = traffic_per_step(plan.strategy, topology, units, precision, num_micro_batches)
    attention = context_traffic(plan.config, plan.batch, units, topology, rank)
    return states + attention * num_micro_batches


class RunMemory:
    """The memory of plans that differ only in what a search chooses.

    Parts that they share are computed once.
    """

    def __init__(self, machine: Machine | None) -> None:
        self._machine = machine
        self._pieces = pieces_by(machine)
        self._units: dict[tuple[object, ...], tuple[tuple[UnitSize, ...], ...]] = {}
        self._points: dict[tuple[object, ...], list[MemorySnapshot]] = {}
        self._shapes: dict[tuple[object, ...], StepShape | RotationShape] = {}
        self._communication: dict[tuple[object, ...], Communication] = {}

    def units(self, plan: RunPlan) -> tuple[UnitSize, ...]:
        """The units of a plan, with their gather, or rotation, counts."""
        return self._sizes(plan)[0]

    def _sizes(self, plan: RunPlan) -> tuple[tuple[UnitSize, ...], ...]:
        """The units of a plan, and fewer with the same model states."""
        rotates = plan.materialize.rotates
        rotated_over = plan.strategy.params if rotates else 1
        recompute = plan.recompute if rotates else None  # then it sends weights once more
        key = (plan.trained, rotated_over, plan.materialize.in_place, recompute, plan.places)
        if key not in self._units:
            units = units_of(
                plan.config,
                world_size=plan.world_size,
                is_trained=plan.trained.__contains__,
                rotated_over=rotated_over,
                in_place=plan.materialize.in_place,
            )
            units = in_buckets(units, plan.strategy, plan.precision)
            self._units[key] = units, merged(units)
        return self._units[key]

    def shape(self, plan: RunPlan) -> StepShape | RotationShape:
        """What the actions of a step depend on."""
        kind, strategy = plan.step_kind, plan.strategy
        if kind not in self._shapes:
            if plan.materialize.rotates:
                ring = RingShape(
                    num_steps=strategy.params,
                    in_place=plan.materialize.in_place,
                    shares_scratch=plan.precision.compute == plan.precision.wire,
                )
                self._shapes[kind] = rotation_shape(plan.config, self.units(plan), ring)
            else:
                self._shapes[kind] = shape_of(
                    plan.config,
                    self.units(plan),
                    gathers=strategy.params > 1,
                    reduces=strategy.grads > 1,
                    prefetch_units=plan.prefetch_units,
                )
        return self._shapes[kind]

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
        return device_memory(snapshot, self._communication_of(plan), device, plan.device_type)

    def _snapshot(self, plan: RunPlan) -> MemorySnapshot:
        key = (plan.step_kind, plan.micro_batch_size, plan.context)
        if key not in self._points:
            self._points[key] = self.tally(plan).largest(plan.num_micro_batches)
        units, alike = self._sizes(plan)
        states = model_state_bytes(plan.strategy, alike, plan.precision)
        points = (now.with_copies(plan, units) for now in self._points[key])
        return max(points, key=lambda now: now.total)._replace(states=states.total)

    def tally(self, plan: RunPlan) -> StepTally:
        """What is allocated while the actions of a step are carried out."""
        shape, units = self.shape(plan), self.units(plan)
        reduces, precision = plan.strategy.grads > 1, plan.precision
        grad_bytes = BYTES_OF[precision.wire if reduces else precision.accumulate]
        if isinstance(shape, RotationShape):
            direct = matmuls_write(grad_bytes, plan.batch)
            activations = [*part_activations(plan.config, plan.batch, shape, direct=direct)]
        else:
            of_units = activations_of(plan.config, plan.batch, units, grad_bytes=grad_bytes)
            activations = [(unit.name, own) for unit, own in zip(units, of_units, strict=True)]
        return StepTally(run=plan, shape=shape, units=units, activations=activations)

    def _communication_of(self, plan: RunPlan) -> Communication:
        sent = plan.strategy.degrees, plan.precision, plan.context
        key = (*sent, plan.collective, plan.materialize)
        if key not in self._communication:
            names = algorithms_of(plan.collective, self._machine)
            found = communication_of(plan, self.units(plan), names, self._pieces)
            self._communication[key] = found
        return self._communication[key]
