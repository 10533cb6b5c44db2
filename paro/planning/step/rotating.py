"""Costs of one step where weights rotate: compute per slice, communication and a lower bound.

A rank computes a part with one slice after another; in place, with one half of every slice, then
with the other.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from paro.planning.cost_model import UnitSize
from paro.planning.rotation import unit_parts
from paro.planning.step.comm_costs import seconds_of
from paro.planning.step.computing import Computing, UnitSeconds
from paro.planning.step.costs import StepCosts
from paro.precision import BYTES_OF, PrecisionConfig
from paro.step.actions import Verb
from paro.step.plan import StepPlan
from paro.step.rotation_plan import RotationShape, rotation_plan
from paro.strategy import Strategy

_FORWARD_SHARE = 1 / 3  # share of an extra slice's cost; backward has twice the products


@dataclass(frozen=True, kw_only=True)
class RotatingComputing(Computing):
    """Compute time of a micro-batch in slices; `units` are those of gathered parameters."""

    rotating: tuple[UnitSize, ...]  # the units of planning/rotation.py
    rotation: RotationShape

    @cached_property
    def buffers(self) -> list[tuple[UnitSize, bool]]:
        """Of every buffer: its unit, and whether it has the parameters that train."""
        return [(unit, trains) for unit in self.rotating for trains in unit.kind.trains]

    @cached_property
    def per_part(self) -> tuple[UnitSeconds, ...]:
        """The times of all slices of every part together, in forward order."""
        first, found = self.rotation.first_trained, []
        for index, (_, part) in enumerate(unit_parts(self.model)):
            shape = self.rotation.parts[index]
            trained = self._trained(index) if index >= first else None
            recomputed = shape.recomputed and index >= first
            if part.method == "look_up":
                whole = super()._embedding()
            elif part.method == "loss":
                whole = self._loss(trained)
            else:
                flops = self.of_attention if part.method == "attention" else self.of_mlp
                whole = self.forward_and_back(flops, trained=trained, recomputed=recomputed)
            found.append(self._in_slices(whole, self.degree * len(shape.halves)))
        return tuple(found)

    @cached_property
    def landings(self) -> Counter[tuple[int, bool]]:
        """Copies out of staging in a micro-batch, by buffer, of weights and of gradients."""
        found: Counter[tuple[int, bool]] = Counter()
        in_place = self.rotation.ring.in_place
        for action in rotation_plan(self.rotation, 1).actions() if in_place else ():
            verb, buffer, *slots = action
            if verb in (Verb.SHIFT, Verb.SHIFT_BACK, Verb.SHIFT_GRADS) and slots[0] == slots[1]:
                found[buffer, verb is Verb.SHIFT_GRADS] += 1
        return found

    @property
    def degree(self) -> int:
        return self.rotation.ring.num_steps

    @cached_property
    def seconds(self) -> float:
        return sum(part.total for part in self.per_part)

    @property
    def adding_seconds(self) -> float:
        """Time to add an extra slice's result to the output, or to the input's gradient."""
        return self.memory_seconds(3 * self.residual_bytes)

    def collect_seconds(
        self, strategy: Strategy, precision: PrecisionConfig, trainable_numel: int
    ) -> float:
        """Time to add gradients to the received sums, and complete sums to the accumulator.

        The first rank of a pass writes its gradients without reading the buffer's old content.
        """
        compute, wire = BYTES_OF[precision.compute], BYTES_OF[precision.wire]
        accumulate = BYTES_OF[precision.accumulate]
        in_ring = compute + 2 * wire - wire / self.degree
        at_owner = (wire + 2 * accumulate) / self.degree
        return self.memory_seconds(trainable_numel * (in_ring + at_owner))

    def _trained(self, index: int) -> float:
        """The share of a part's weights that trains."""
        own = {number for half in self.rotation.parts[index].halves for number in half}
        units = {unit.name: unit for n, (unit, _) in enumerate(self.buffers) if n in own}.values()
        return sum(unit.trainable_numel for unit in units) / sum(unit.numel for unit in units)

    def _loss(self, trained: float | None) -> UnitSeconds:
        """Head and loss: no gradients in forward, so backward recomputes the logits."""
        seconds = self.forward_and_back(self.of_logits, trained=trained, recomputed=False)
        if trained is None:
            return seconds
        logits = self._seconds(self.of_logits.products)
        return replace(seconds, until_first_gradient=seconds.until_first_gradient + logits)

    def _in_slices(self, whole: UnitSeconds, number: int) -> UnitSeconds:
        """The times with the extra cost of computing in this number of slices."""
        piece, adding = self.device.piece_seconds, self.adding_seconds
        forward = (number - 1) * (piece * _FORWARD_SHARE + adding)
        backward = (number - 1) * (piece * (1 - _FORWARD_SHARE) + adding)
        has_backward = whole.until_first_gradient + whole.rest_of_backward > 0
        return UnitSeconds(
            forward=whole.forward + forward,
            recompute=whole.recompute + forward if whole.recompute else 0.0,
            until_first_gradient=whole.until_first_gradient,
            rest_of_backward=whole.rest_of_backward + (backward if has_backward else 0.0),
        )


@dataclass(frozen=True, kw_only=True)
class RotatingCosts(StepCosts):
    """The costs of a step if params and grads have the same degree, the number of ranks in a ring.

    `comm_costs` are those of rotating units: a gather, or a reduction, is a pass round the ring.
    """

    computing: RotatingComputing

    @property
    def in_place(self) -> bool:
        return self.computing.rotation.ring.in_place

    @property
    def plan(self) -> StepPlan:
        rotation = self.computing.rotation
        return rotation_plan(rotation, self.num_micro_batches, self.updated_ahead)

    def landing_seconds(self, buffer: int, *, of_grads: bool) -> float:
        """In place: time to copy a received slice out of staging."""
        unit, trains = self.computing.buffers[buffer]
        precision = self.comm_costs.precision
        numel = unit.trainable_numel if trains else unit.frozen_numel
        kind = precision.wire if of_grads else precision.compute if trains else precision.frozen
        return self.computing.memory_seconds(2 * numel * BYTES_OF[kind] // self.computing.degree)

    def compute_seconds(self) -> float:
        landing = sum(
            number * self.landing_seconds(buffer, of_grads=of_grads)
            for (buffer, of_grads), number in self.computing.landings.items()
        )
        return super().compute_seconds() + self.num_micro_batches * landing

    def _always_exposed(self) -> float:
        """Seconds of the last reductions of the first part's gradients, after their pass.

        In place nothing overlaps: every pass is waited for.
        """
        shape = self.computing.rotation
        if shape.first_trained == len(shape.parts):
            return 0.0
        costs = [part for parts in self.comm_costs.per_unit for part in parts]
        last = (costs[buffer] for buffer in shape.parts[shape.first_trained].halves[0])
        exposed = sum(seconds_of((*part.step_reduce, *part.replicas)) for part in last)
        if self.in_place:
            whole, once_per_step = (self.comm_costs.loads(n) for n in (self.num_micro_batches, 0))
            exposed += whole.one_by_one - once_per_step.one_by_one
        return exposed
