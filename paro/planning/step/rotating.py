"""Compute time of a rank where weights rotate, part by part.

A rank computes a part with one slice after another; in place, with one half of every slice, then
with the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from paro.planning.rotation import unit_parts
from paro.planning.step.computing import Computing, UnitSeconds
from paro.planning.step.passes import StepCounts
from paro.precision import BYTES_OF, PrecisionConfig
from paro.step.actions import Verb
from paro.step.rotation_plan import RotationShape
from paro.strategy import Strategy

_FORWARD_SHARE = 1 / 3  # share of an extra slice's cost; backward has twice the products


@dataclass(frozen=True, kw_only=True)
class RotatingComputing(Computing):
    """Compute time of a micro-batch in slices; `units` are those of gathered parameters."""

    counts: StepCounts  # of the actions that rotate weights

    @property
    def rotation(self) -> RotationShape:
        assert isinstance(self.counts.shape, RotationShape), "weights are gathered"
        return self.counts.shape

    @cached_property
    def per_unit(self) -> tuple[UnitSeconds, ...]:
        """The times of all slices of every part together, in forward order."""
        first, found = self.rotation.first_trained, []
        for index, (_, part) in enumerate(unit_parts(self.model)):
            shape = self.rotation.parts[index]
            trained = self._trained(index) if index >= first else None
            recomputed = shape.recomputed and index >= first
            if part.method == "look_up":
                whole = self._embedding()
            elif part.method == "loss":
                whole = self._loss(trained)
            else:
                flops = self.of_attention if part.method == "attention" else self.of_mlp
                whole = self.forward_and_back(flops, trained=trained, recomputed=recomputed)
            found.append(self._in_slices(whole, self.degree * len(shape.halves)))
        return tuple(found)

    @property
    def degree(self) -> int:
        return self.rotation.ring.num_steps

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
        halves = self.rotation.parts[index].halves
        units = {self.counts.buffers[number][0] for half in halves for number in half}
        return sum(unit.trainable_numel for unit in units) / sum(unit.numel for unit in units)

    def _loss(self, trained: float | None) -> UnitSeconds:
        """Head and loss: no gradients in forward, so backward recomputes the logits."""
        seconds = self.forward_and_back(self.of_logits, trained=trained, recomputed=False)
        if trained is None:
            return seconds
        logits = self._seconds(self.of_logits.products)
        return {**seconds, Verb.BACKWARD: seconds[Verb.BACKWARD] + logits}

    def _in_slices(self, whole: UnitSeconds, number: int) -> UnitSeconds:
        """The times with the extra cost of computing in this number of slices."""
        piece, adding = self.device.piece_seconds, self.adding_seconds
        forward = (number - 1) * (piece * _FORWARD_SHARE + adding)
        backward = (number - 1) * (piece * (1 - _FORWARD_SHARE) + adding)
        found = {**whole, Verb.FORWARD: whole[Verb.FORWARD] + forward}
        if whole.get(Verb.RECOMPUTE):
            found[Verb.RECOMPUTE] = whole[Verb.RECOMPUTE] + forward
        if whole.get(Verb.BACKWARD):
            found[Verb.GRADIENTS] = whole.get(Verb.GRADIENTS, 0.0) + backward
        return found
