"""Predicts what a rank of a run takes of its device, and sends, for trainer and planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from model.config import LlamaConfig, RecomputeConfig
from paro.context_parallel.layout import ALONE, ContextLayout
from paro.distributed.byte_counter import Sent
from paro.optim.deal import places_to_deal_to
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
    code_bytes,
    device_memory,
    nccl_communication,
)
from paro.planning.memory.rotating import part_activations
from paro.planning.memory.tally import MemorySnapshot, Point, StepTally
from paro.planning.micro_batch import MicroBatch
from paro.planning.rotation import rotation_shape
from paro.planning.search.search_space import Materialize
from paro.planning.units import (
    activations_of,
    matmuls_write,
    shape_of,
    units_of,
)
from paro.precision import BYTES_OF, PrecisionConfig
from paro.step.actions import StepShape
from paro.step.rotating import RingShape
from paro.step.rotation_plan import RotationShape
from paro.strategy import Strategy
from paro.topology import Topology, make_topology


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What decides how much memory a rank of a run takes, in addition to its machine."""

    model: LlamaConfig
    trained: frozenset[str]  # the names of the parameters that train
    recompute: RecomputeConfig | None  # instead of the model's
    world_size: int
    group_size: int
    strategy: Strategy
    materialize: Materialize
    collective: str
    prefetch_units: int
    precision: PrecisionConfig
    device_type: str
    seq_length: int
    micro_batch_size: int
    num_micro_batches: int  # the most of a step
    eval_micro_batch_size: int = 0  # 0: no evaluation
    context: ContextLayout = ALONE

    @property
    def step_kind(self) -> tuple[object, ...]:
        """Plans of equal kind have the same actions in a step."""
        params, grads, _ = self.strategy.degrees
        degrees = (params,) if self.materialize.rotates else (params > 1, grads > 1)
        return self.trained, self.recompute, self.materialize, degrees, self.places

    @property
    def places(self) -> int:
        """How many units with Muon's matrices form a bucket."""
        return places_to_deal_to(self.strategy, self.precision)

    @property
    def config(self) -> LlamaConfig:
        """The model with this recomputation."""
        return replace(self.model, recompute=self.recompute)

    @property
    def topology(self) -> Topology:
        degrees = self.strategy.degrees
        return make_topology(
            world_size=self.world_size, group_size=self.group_size, degrees=degrees
        )

    @property
    def batch(self) -> MicroBatch:
        return MicroBatch(
            size=self.micro_batch_size,
            seq_length=self.seq_length,
            compute_bytes=BYTES_OF[self.precision.compute],
            device_type=self.device_type,
            context=self.context.in_groups(self.group_size),
        )


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
        self._points: dict[tuple[object, ...], list[tuple[MemorySnapshot, Point]]] = {}
        self._shapes: dict[tuple[object, ...], StepShape | RotationShape] = {}
        self._communication: dict[tuple[object, ...], Communication] = {}

    def units(self, plan: RunPlan) -> tuple[UnitSize, ...]:
        """The units of a plan, with their gather, or rotation, counts."""
        return self._sizes(plan)[0]

    def _sizes(self, plan: RunPlan) -> tuple[tuple[UnitSize, ...], ...]:
        """The units of a plan, fewer with the same model states, and one of each traffic kind."""
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
            kinds = {unit.traffic_kind: unit for unit in units}
            self._units[key] = units, merged(units), tuple(kinds.values())
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
            evaluation = replace(forward, name=name, states=snapshot.states)
            snapshot = max(snapshot, evaluation, key=lambda one: one.total)
        device = None if machine is None else machine.device
        return device_memory(snapshot, self._communication_of(plan), device, plan.device_type)

    def _snapshot(self, plan: RunPlan) -> MemorySnapshot:
        key = (plan.step_kind, plan.micro_batch_size)
        if key not in self._points:
            self._points[key] = self.tally(plan).largest(plan.num_micro_batches)
        states = model_state_bytes(plan.strategy, self._sizes(plan)[1], plan.precision)
        given = plan.strategy, plan.precision, plan.world_size, plan.group_size
        added = [(point.added(*given), now) for now, point in self._points[key]]
        transient, now = max(added, key=lambda both: both[0] + both[1].total - both[1].transient)
        return replace(now, states=states.total, transient=transient)

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
        return StepTally(
            shape=shape,
            units=units,
            activations=activations,
            strategy=plan.strategy,
            precision=precision,
            device_type=plan.device_type,
            world_size=plan.world_size,
            group_size=plan.group_size,
        )

    def _communication_of(self, plan: RunPlan) -> Communication:
        key = (plan.strategy.degrees, plan.collective, plan.materialize, plan.precision)
        if key not in self._communication:
            self._communication[key] = self._communicate(plan)
        return self._communication[key]

    def _communicate(self, plan: RunPlan) -> Communication:
        topology, found = plan.topology, Communication()
        if plan.device_type == "cuda":
            found = nccl_communication(
                plan.strategy,
                topology,
                self._sizes(plan)[2],
                plan.precision,
                algorithms_of(plan.collective, self._machine),
                self._pieces,
                rotates=plan.materialize.rotates,
            )
            axes = plan.context.topology(world_size=plan.world_size, group_size=plan.group_size)
            num_groups = found.num_groups + plan.context.num_groups(axes)
            found = replace(found, num_groups=num_groups)
        codes = code_bytes(plan.strategy, topology, self.units(plan), plan.precision)
        return replace(found, code_bytes=codes)
