"""Compute time of a rank in a micro-batch and in an update, unit by unit, or part by part."""

# Matrix products are counted as in model/flops.py's flops_per_token, attention in full, and run at
# the device's sustained FLOP/s; where the device has a rate of attention's own, its FLOPs count as
# those that take as long. Memory-bound work takes its bytes over the memory bandwidth. The loss
# computes its gradients in forward, so the head's backward is part of its forward. Backward is
# twice the forward: once for the gradients of inputs, once for those of weights, as far as these
# train. Below the first trained unit there is none.
#
#     collect a gradient    read it, write it; if it is added to an accumulator, read that too
#     update                read the gradient twice (norm, update), read and write master and
#                           moments, write the parameter; with Muon counted as AdamW's
#     codes                 what every operation reads and writes (comm_costs.py), at a rate of
#                           their own

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from model.config import LlamaConfig
from model.units import PartSpec, unit_specs
from paro.errors import UserError
from paro.machine.machine import Device, Machine
from paro.planning.passes import StepCounts
from paro.precision import BYTES_OF, PrecisionConfig
from paro.spec.run_spec import MicroBatch
from paro.spec.states import adamw_states, bytes_of
from paro.step.actions import StepShape, Verb
from paro.strategy import Strategy

# Share of the memory bandwidth at which CPU ranks make codes, where the machine file gives no rate:
# measured 0.33 to 0.54, since codes take many small operations.
_CODING_SHARE = 0.4
_FIRST_GRADIENT_SHARE = 0.1  # share of a block's backward before its first gradient exists
_FORWARD_SHARE = 1 / 3  # share of an extra slice's cost; backward has twice the products

# Training-thread time of a unit's actions in a micro-batch, without collecting its gradients.
UnitSeconds = dict[Verb, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class Computing:
    """The compute time of a model's micro-batch on a device.

    Where weights rotate, a rank computes a part with one slice after another; in place, with one
    half of every slice, then with the other.
    """

    model: LlamaConfig
    step: StepCounts
    batch: MicroBatch
    device: Device

    @cached_property
    def per_unit(self) -> tuple[UnitSeconds, ...]:
        """The times of every unit, or of all slices of every part together, in forward order."""
        shape = self.step.shape
        computed: list[tuple[PartSpec, ...]] = [spec.parts for spec in unit_specs(self.model)]
        if shape.num_slices > 1:
            computed = [(part,) for parts in computed for part in parts]
        again = frozenset(chain.from_iterable(shape.recomputed))
        return tuple(self._times(n, parts, n in again) for n, parts in enumerate(computed))

    @cached_property
    def forward_seconds(self) -> float:
        """The compute time of the forward of a micro-batch."""
        return sum(unit[Verb.FORWARD] + unit.get(Verb.LOSS, 0.0) for unit in self.per_unit)

    @cached_property
    def seconds(self) -> float:
        """The compute time of a micro-batch."""
        return sum(sum(unit.values()) for unit in self.per_unit)

    def attention_seconds(self, unit: int) -> float:
        """Compute the time of a forward of a block's attention, without products with weights."""
        recomputed = unit in chain.from_iterable(self.step.shape.recomputed)
        return self._seconds(self._attention_flops(recomputed))

    def memory_seconds(self, num_bytes: float) -> float:
        """Compute the time of memory-bound work that reads and writes this many bytes."""
        return num_bytes / self.device.memory_bytes_per_second

    def collect_seconds(self, strategy: Strategy, precision: PrecisionConfig, numel: int) -> float:
        """Compute the time to collect gradients, one by one, in the training thread.

        Where weights rotate, to add them to the received sums, and complete sums to the
        accumulator. The first rank of a pass writes its gradients without reading the buffer's old
        content.
        """
        compute, wire = BYTES_OF[precision.compute], BYTES_OF[precision.wire]
        accumulate, degree = BYTES_OF[precision.accumulate], self.step.shape.num_slices
        of_element: float = compute + (wire if strategy.grads > 1 else 2 * accumulate)
        if degree > 1:
            of_element = compute + 2 * wire - wire / degree + (wire + 2 * accumulate) / degree
        return self.memory_seconds(numel * of_element)

    def update_seconds(self, strategy: Strategy, precision: PrecisionConfig, numel: int) -> float:
        twice = BYTES_OF[precision.accumulate] + bytes_of(adamw_states(precision))
        of_element = 2 * twice + BYTES_OF[precision.compute]
        return self.memory_seconds(numel // strategy.optim * of_element)

    def _seconds(self, flops: float) -> float:
        return flops / self.device.sustained_flops

    @property
    def _residual_bytes(self) -> int:
        return self.batch.tensor_bytes(self.model.hidden_size)

    def _attention_flops(self, recomputed: bool) -> float:
        """Count FLOPs of a forward of a block's attention, at the speed of other products."""
        config, tokens, device = self.model, self.batch.num_tokens, self.device
        query = config.num_attention_heads * config.kv_channels
        in_parts = self.batch.context.ring > 1 or (config.keeps_core and recomputed)
        own = device.documents_flops if self.batch.apart else in_parts and device.parts_flops
        own, others = own or device.attention_flops, device.sustained_flops
        return 2.0 * tokens * 2 * self.batch.seq_length * query * (others / (own or others))

    @cached_property
    def _product_flops(self) -> dict[str, float]:
        """The FLOPs of a forward's products with weights, by method."""
        embedding, block, *_ = unit_specs(self.model)
        shapes, found = {**embedding.shapes, **block.shapes}, {}
        for part in (*embedding.parts, *block.parts):
            weights = (math.prod(shapes[name]) for name in part.cuts if len(shapes[name]) > 1)
            found[part.method] = 2.0 * self.batch.num_tokens * sum(weights)
        return found | {"loss": found["look_up"]}

    def _of_slices(self, index: int) -> tuple[float, float]:
        """Compute the time that slices add to a forward, and to a backward, of a part."""
        number = self.step.shape.num_slices * len(self.step.shape.halves(index))
        piece = self.device.piece_seconds
        adding = self.memory_seconds(3 * self._residual_bytes)  # to the output, or its gradient
        shares = (_FORWARD_SHARE, 1 - _FORWARD_SHARE)
        forward, backward = ((number - 1) * (piece * share + adding) for share in shares)
        return forward, backward

    def _times(self, index: int, parts: Sequence[PartSpec], recomputed: bool) -> UnitSeconds:
        """Compute the times of a unit, or of a part in slices; a block begins with attention."""
        shape, method = self.step.shape, parts[0].method
        more, more_back = self._of_slices(index)
        reached = index >= shape.first_trained  # by backward
        if method == "look_up":
            forward = self.memory_seconds(2 * self._residual_bytes) + more
            backward = self.memory_seconds(3 * self._residual_bytes)
            of_back = {Verb.BACKWARD: backward, Verb.GRADIENTS: more_back}
            return {Verb.FORWARD: forward, **(of_back if reached else {})}
        products = sum(self._product_flops[part.method] for part in parts)
        attention = self._attention_flops(recomputed) if method == "attention" else 0.0
        forward = self._seconds(products + attention)
        if not reached:
            return {Verb.FORWARD: forward + more}
        # A tied head borrows its weights: they are of the last buffer's unit.
        units = {self.step.buffers[half[-1]].unit for half in shape.halves(index)}
        trained = sum(unit.trainable.numel for unit in units) / sum(unit.numel for unit in units)
        if method == "loss" and isinstance(shape, StepShape):
            # As much again for the gradients of each operand.
            loss, chunk = (2 + trained) * forward, self.batch.loss_chunk(self.model)
            of_chunk = min(1.0, chunk / self.batch.num_tokens)
            later = loss - of_chunk * forward if shape.grads_in_forward else 0.0
            return {Verb.FORWARD: loss - later, Verb.LOSS: later}
        recompute = self.model.recompute
        again = self._seconds(products) if self.model.keeps_core else forward
        core = attention if recompute is not None and recompute.core_attention else 0.0
        backward = self._seconds((1 + trained) * products + 2 * attention + core)
        # Where weights rotate, the loss makes no gradients in forward: it computes logits again.
        logits = forward if method == "loss" else 0.0
        return {
            Verb.FORWARD: forward + more,
            Verb.RECOMPUTE: again + more if recomputed else 0.0,
            Verb.BACKWARD: _FIRST_GRADIENT_SHARE * backward + logits,
            Verb.GRADIENTS: (1 - _FIRST_GRADIENT_SHARE) * backward + more_back,
        }


def coding_seconds(device: Device, num_bytes: float) -> float:
    """Compute the time to encode or decode with this memory traffic."""
    rate = device.coding_bytes_per_second
    if rate is None:
        share = 1.0 if device.cores is None else _CODING_SHARE
        rate = share * device.memory_bytes_per_second
    return num_bytes / rate


def device_of(machine: Machine) -> Device:
    """Return the device of a machine; `UserError` if its file has none."""
    if machine.device is None:
        raise UserError(
            f"machine {machine.name}: device is missing, which planning needs: add an object with "
            "name, memory_bytes, reserved_bytes, peak_flops, sustained_flops and "
            "memory_bytes_per_second"
        )
    return machine.device
