"""Peak memory of a rank where parameters are gathered: the actions of a step, added up."""

# The actions (paro/step/plan.py) are followed with what each allocates and frees. Where a unit
# computes, and in a step's reduction and update, a snapshot adds up
#
#   model states   shards that stay throughout
#   whole params   between a buffer's gather and its release
#   whole grads    unit-sized gradient buffers, until their reduction is waited for
#   weights in fp8 with their transposes: those of all units where parameters stay for several
#                  micro-batches, else those of the units that are recomputed
#   activations    kept for backward by the units that have run forward
#   transient      extra memory of the computation, of a reduction's conversion or of the update
#
# and the largest sum is the peak. Not counted: library workspaces, the allocator's rounding,
# buffers of collectives (device.py counts those on GPUs), RoPE's rotations, labels and loss weights
# (16 bytes per token).

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from model.config import LlamaConfig
from paro.planning.cost_model import UnitSize, merged, model_state_bytes
from paro.planning.micro_batch import MicroBatch
from paro.planning.units import UnitActivations, activations_of, matmuls_write, shape_of
from paro.precision import BYTES_OF, PrecisionConfig
from paro.step.actions import Move, Verb
from paro.step.plan import StepPlan, step_plan
from paro.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySnapshot:
    """Bytes that are alive on a rank at one point of a step."""

    name: str
    states: int
    whole_params: int = 0
    whole_grads: int = 0
    slices: int = 0  # of parameters and gradients that rotate
    casts: int = 0  # of weights, in fp8
    activations: int = 0
    transient: int = 0

    @property
    def total(self) -> int:
        whole = self.whole_params + self.whole_grads
        return self.states + whole + self.slices + self.casts + self.activations + self.transient

    def parts(self) -> dict[str, int]:
        """The parts of the total by name, in bytes."""
        whole = {"whole parameters": self.whole_params, "whole gradients": self.whole_grads}
        return {
            "model states": self.states,
            **({"slices under way": self.slices} if self.slices else whole),
            **({"weights in fp8": self.casts} if self.casts else {}),
            "activations": self.activations,
            "transient": self.transient,
        }

    def describe(self) -> str:
        """One line with all parts that are not 0, in GB, or in MB if the total is below 1 GB."""
        unit, scale = ("GB", 1e9) if self.total >= 1e9 else ("MB", 1e6)
        parts = ((name, size) for name, size in self.parts().items() if size)
        listed = ", ".join(f"{name} {size / scale:.1f}" for name, size in parts)
        return f"{self.total / scale:.1f} {unit} at {self.name}: {listed}"


class Point(NamedTuple):
    """A snapshot without what depends on the size of a degree: model states and copies."""

    snapshot: MemorySnapshot
    converted: int = 0  # elements of the gradients that a reduction converts
    updated: int = 0  # elements of the largest unit, whose gradients the update copies


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """The peaks of many strategies for one model and batch, from at most four lists of actions.

    Whole parameters and gradients depend only on whether their degree is 1. Of points with equal
    copies only the largest is kept.
    """

    world_size: int
    model: LlamaConfig
    units: tuple[UnitSize, ...]
    precision: PrecisionConfig
    batch: MicroBatch
    prefetch_units: int
    num_micro_batches: int

    def of(self, strategy: Strategy) -> MemorySnapshot:
        """The memory snapshot of a step with the largest total."""
        kind = strategy.params > 1, strategy.grads > 1
        if kind not in self._largest:
            self._largest[kind] = self._largest_of(strategy)
        found = self.under(strategy, self._largest[kind])
        return max(found, key=lambda snapshot: snapshot.total)

    def under(self, strategy: Strategy, points: Iterable[Point]) -> Iterator[MemorySnapshot]:
        """These points with what depends on the size of a degree."""
        states = model_state_bytes(strategy, self._merged, self.precision).total
        converts, copies = self._conversion_bytes(strategy), fp32_copy_bytes(self.precision)
        for snapshot, converted, updated in points:
            yield replace(
                snapshot,
                states=states,
                transient=snapshot.transient
                + converted // strategy.grads * converts
                + updated // strategy.optim * copies,
            )

    @cached_property
    def activations(self) -> tuple[UnitActivations, ...]:
        return activations_of(self.model, self.batch, self.units)

    @cached_property
    def _largest(self) -> dict[tuple[bool, bool], list[Point]]:
        return {}

    @cached_property
    def _merged(self) -> tuple[UnitSize, ...]:
        return merged(self.units)

    def _largest_of(self, strategy: Strategy) -> list[Point]:
        """The largest point for each pair of copies."""
        largest: dict[tuple[int, int], Point] = {}
        for point in self._points(strategy):
            key = point.converted, point.updated
            if key not in largest or point.snapshot.total > largest[key].snapshot.total:
                largest[key] = point
        return list(largest.values())

    def _points(self, strategy: Strategy) -> Iterator[Point]:
        tally = StepTally(self, strategy)
        for action in tally.plan(self.num_micro_batches).actions():
            point = tally.carry_out(action)
            if point is not None:
                yield point

    def _conversion_bytes(self, strategy: Strategy) -> int:
        """Bytes per element of the copy that is reduced after accumulation; 0 if there is none."""
        nothing_left = strategy.grads == strategy.optim == self.world_size
        if nothing_left or self.precision.wire == self.precision.accumulate:
            return 0
        return BYTES_OF[self.precision.wire]


MOST_MICRO_BATCHES = 3  # the first, one in the middle, the last: those in the middle are alike


class StepTally:
    """What is allocated while the actions of a step are carried out, from no whole buffers on."""

    columns = ("params", "grads", "activations", "total")

    def __init__(self, peak: PeakMemory, strategy: Strategy) -> None:
        self.peak, self.strategy, self.precision = peak, strategy, peak.precision
        self.units, self.activations = peak.units, peak.activations
        self.shape = shape = shape_of(
            peak.model,
            peak.units,
            gathers=strategy.params > 1,
            reduces=strategy.grads > 1,
            prefetch_units=peak.prefetch_units,
        )
        compute, frozen, wire = (
            BYTES_OF[kind]
            for kind in (peak.precision.compute, peak.precision.frozen, peak.precision.wire)
        )
        self.param_bytes: dict[int, int] = {}
        self.grad_bytes: dict[int, int] = {}
        self.unit_of: dict[int, int] = {}
        for index, (unit, size) in enumerate(zip(shape.units, peak.units, strict=True)):
            for buffer in unit.trainable:
                self.param_bytes[buffer] = size.trainable_numel * compute
                self.grad_bytes[buffer] = size.trainable_numel * wire
            for buffer in unit.frozen:
                self.param_bytes[buffer] = size.frozen_numel * frozen
            self.unit_of |= dict.fromkeys((*unit.trainable, *unit.frozen), index)
        # The type of the buffer for the gradients of a micro-batch.
        grad_type = peak.precision.wire if shape.reduces else peak.precision.accumulate
        self.grads_in_fp32 = BYTES_OF[grad_type] == 4
        self.is_direct = matmuls_write(grad_type, peak.precision, peak.batch.device_type)
        self.whole_params = self.whole_grads = self.activation_bytes = self.recomputed = 0
        self.keeps: set[int] = set()  # buffers whose weights' casts stay
        self.cast: set[int] = set()  # units whose weights' casts exist

    def plan(self, num_micro_batches: int, updated_ahead: int | None = None) -> StepPlan:
        """The actions of a step, of three micro-batches at most."""
        return step_plan(self.shape, min(num_micro_batches, MOST_MICRO_BATCHES), updated_ahead)

    def computing(self, action: Move) -> tuple[int, str]:
        """What a computing action is about: a buffer of its unit, and the name."""
        return self.shape.units[action[1]].needed[0], self.units[action[1]].name

    def alive(self, point: Point) -> tuple[int, ...]:
        """Bytes at a point, by column; the total with the model states and what computes."""
        (now,) = self.peak.under(self.strategy, [point])
        return now.whole_params + now.casts, now.whole_grads, now.activations, now.total

    def carry_out(self, action: Move) -> Point | None:
        """The point at which something computes or a gradient is converted."""
        verb, number = action[:2]
        if verb >= Verb.FORWARD:
            return self._compute(verb, number)
        if verb is Verb.GATHER:
            self.whole_params += self.param_bytes[number]
        elif verb is Verb.RELEASE:
            self.whole_params -= self.param_bytes[number]
            self._drop(number)
        elif verb is Verb.ALLOCATE:
            self.whole_grads += self.grad_bytes[number]
        elif verb is Verb.FREE:
            self.whole_grads -= self.grad_bytes[number]
        elif verb is Verb.KEEP:
            self.keeps.add(number)
        elif verb is Verb.DROP:
            self._drop(number)
        elif verb is Verb.STEP_REDUCE:
            unit = self.units[self.unit_of[number]]
            point = self.point(f"the reduction of {unit.name}")
            return Point(point, converted=unit.trainable_numel)
        elif verb is Verb.UPDATE:
            unit = self.units[self.unit_of[number]]
            return Point(self.point("the update"), updated=unit.trainable_numel)
        return None

    def _drop(self, buffer: int) -> None:
        self.keeps.discard(buffer)
        self.cast.discard(self.unit_of[buffer])

    def _compute(self, verb: Verb, index: int) -> Point | None:
        own, name = self.activations[index], self.units[index].name
        before, after = own.before_gradients, own.in_backward
        if own.direct is not None and self.is_direct:
            before, after = own.direct
        is_forward = verb in (Verb.FORWARD, Verb.RECOMPUTE)
        if is_forward and not self.keeps.isdisjoint(self.shape.units[index].needed):
            self.cast.add(index)
        if verb is Verb.FORWARD:
            if index >= self.shape.first_trained:
                self.activation_bytes += own.kept
            return Point(self.point(f"the forward of {name}", own.in_forward))
        if verb is Verb.LOSS:
            assert own.writes_in_forward is not None, f"{name} makes no gradient in forward"
            transient = own.writes_in_forward[self.grads_in_fp32]
            return Point(self.point(f"the forward of {name}", transient))
        if verb is Verb.RECOMPUTE:
            self.activation_bytes += own.recomputed
            return None
        if verb is Verb.BACKWARD:
            return Point(self.point(f"the backward of {name}", before))
        point = self.point(f"the backward of {name}", after)
        self.activation_bytes -= own.kept - own.kept_to_the_end + own.recomputed
        if index == self.shape.first_trained:  # the end of backward
            self.activation_bytes = 0
        return Point(point)

    def point(self, name: str, transient: int = 0) -> MemorySnapshot:
        """What is alive now, without model states."""
        return MemorySnapshot(
            name=name,
            states=0,
            whole_params=self.whole_params,
            whole_grads=self.whole_grads,
            casts=sum(self.activations[index].casts for index in self.cast),
            activations=self.activation_bytes,
            transient=transient,
        )


def fp32_copy_bytes(precision: PrecisionConfig) -> int:
    """Bytes per element of the fp32 gradient copy in the update; 0 if there is none."""
    return 0 if precision.accumulate == "fp32" else 4
