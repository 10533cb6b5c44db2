"""Costs of one step where weights rotate: compute per slice, communication and a lower bound.

Parts, in forward order: the embedding, attention and MLP of every block, the head. A rank computes
a part with one slice after another; in place, with one half of every slice, then with the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from paro.planning.cost_model import UnitSize
from paro.planning.rotation import units_by_part
from paro.planning.step.comm_costs import seconds_of
from paro.planning.step.computing import Computing, UnitSeconds
from paro.planning.step.costs import StepCosts
from paro.precision import BYTES_OF, PrecisionConfig
from paro.strategy import Strategy

_FORWARD_SHARE = 1 / 3  # share of an extra slice's cost; backward has twice the products


@dataclass(frozen=True, slots=True, kw_only=True)
class RotatedPart:
    """A part of the model: the units of its weights, and the time of all its slices together."""

    name: str
    halves: tuple[str, ...]  # its units: whole slices, or the two halves of them
    seconds: UnitSeconds
    returns: bool = True  # backward reads the weights
    recomputed_from: int | None = None  # index of the part at which its recomputation begins


@dataclass(frozen=True, kw_only=True)
class RotatingComputing(Computing):
    """Compute time of a micro-batch in slices; `units` are those of gathered parameters."""

    rotating: tuple[UnitSize, ...]  # the units of planning/rotation.py
    degree: int

    @cached_property
    def parts(self) -> tuple[RotatedPart, ...]:
        """The model's parts, in forward order."""
        tied = self.model.tie_embeddings_and_output_weights
        parts = [self._part("embedding", super()._embedding(), returns=False)]
        group_of = {index: group for group in self.recomputed_groups for index in group}
        for index in range(1, len(self.units) - 1):
            name, group = self.units[index].name, group_of.get(index)
            for part, flops in (("attention", self.of_attention), ("mlp", self.of_mlp)):
                trained = self._trained(f"{name}.{part}") if index >= self.first_trained else None
                seconds = self.forward_and_back(
                    flops, trained=trained, recomputed=group is not None
                )
                parts.append(self._part(f"{name}.{part}", seconds))
            if group and index == group[-1]:  # units 1, 2, .. are parts 1 and 2, 3 and 4, ..
                parts[-1] = replace(parts[-1], recomputed_from=2 * group[0] - 1)
        holder = "embedding" if tied else "head"
        parts.append(self._part("head", self._loss(self._trained(holder)), holder=holder))
        return tuple(parts)

    @cached_property
    def first_trained_part(self) -> int:
        """Index of the first part that backward reaches; the number of parts if none trains."""
        first = self.first_trained
        if first >= len(self.units) - 1:
            return len(self.parts) - (first < len(self.units))
        return max(0, 2 * first - 1)

    @cached_property
    def seconds(self) -> float:
        return sum(part.seconds.total for part in self.parts)

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

    @cached_property
    def _by_part(self) -> dict[str, list[UnitSize]]:
        return units_by_part(self.rotating)

    def _trained(self, part: str) -> float:
        """The share of a part's weights that trains."""
        units = self._by_part[part]
        return sum(unit.trainable_numel for unit in units) / sum(unit.numel for unit in units)

    def _loss(self, trained: float) -> UnitSeconds:
        """Head and loss: no gradients in forward, so backward recomputes the logits."""
        if self.first_trained == len(self.units):
            return UnitSeconds(forward=self._seconds(self.of_logits.products))
        seconds = self.forward_and_back(self.of_logits, trained=trained, recomputed=False)
        logits = self._seconds(self.of_logits.products)
        return replace(seconds, until_first_gradient=seconds.until_first_gradient + logits)

    def _part(
        self, name: str, whole: UnitSeconds, *, returns: bool = True, holder: str | None = None
    ) -> RotatedPart:
        """A part whose times include the extra cost of its slices."""
        halves = tuple(unit.name for unit in self._by_part[holder or name])
        further = self.degree * len(halves) - 1
        forward = further * (self.device.piece_seconds * _FORWARD_SHARE + self.adding_seconds)
        backward = further * (
            self.device.piece_seconds * (1 - _FORWARD_SHARE) + self.adding_seconds
        )
        has_backward = whole.until_first_gradient + whole.rest_of_backward > 0
        seconds = UnitSeconds(
            forward=whole.forward + forward,
            recompute=whole.recompute + forward if whole.recompute else 0.0,
            until_first_gradient=whole.until_first_gradient,
            rest_of_backward=whole.rest_of_backward + (backward if has_backward else 0.0),
        )
        return RotatedPart(name=name, halves=halves, seconds=seconds, returns=returns)


@dataclass(frozen=True, kw_only=True)
class RotatingCosts(StepCosts):
    """The costs of a step if params and grads have the same degree, the number of ranks in a ring.

    `comm_costs` are those of rotating units: a gather, or a reduction, is a pass round the ring.
    """

    computing: RotatingComputing

    @property
    def in_place(self) -> bool:
        return self.comm_costs.in_place

    def copy_seconds(self, num_bytes: int) -> float:
        """In place: time to copy a received slice out of staging, for a unit of `num_bytes`."""
        return self.computing.memory_seconds(2 * num_bytes // self.computing.degree)

    def compute_seconds(self) -> float:
        if not self.in_place:
            return super().compute_seconds()
        precision = self.comm_costs.precision
        compute, wire = BYTES_OF[precision.compute], BYTES_OF[precision.wire]
        copying = sum(
            unit.gathers_per_micro_batch * self.copy_seconds(unit.numel * compute)
            + unit.reductions_per_micro_batch * self.copy_seconds(unit.trainable_numel * wire)
            for unit in self.comm_costs.units
            if not unit.replicated
        )
        shifts = (self.computing.degree - 1) * self.num_micro_batches
        return super().compute_seconds() + copying * shifts

    def _always_exposed(self) -> float:
        """Seconds of the last reductions of the first part's gradients, after their pass.

        In place nothing overlaps: every pass is waited for.
        """
        first = self.computing.first_trained_part
        if first == len(self.computing.parts):
            return 0.0
        by_name = dict(
            zip((u.name for u in self.comm_costs.units), self.comm_costs.per_unit, strict=True)
        )
        last = by_name[self.computing.parts[first].halves[0]]
        exposed = sum(seconds_of((*part.step_reduce, *part.replicas)) for part in last)
        if self.in_place:
            whole, once_per_step = (self.comm_costs.loads(n) for n in (self.num_micro_batches, 0))
            exposed += whole.one_by_one - once_per_step.one_by_one
        return exposed
