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
from dataclasses import dataclass
from functools import cached_property

from model.config import LOSS_CHUNK_TOKENS, LlamaConfig
from model.units import unit_specs
from paro.errors import UserError
from paro.optim.states import adamw_states, bytes_of
from paro.planning.machine.machine import Device, Machine
from paro.planning.passes import StepCounts
from paro.planning.run_plan import MicroBatch
from paro.precision import BYTES_OF, PrecisionConfig
from paro.step.actions import Verb
from paro.step.rotation_plan import RotationShape
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
    """Compute time of a model's micro-batch on a device.

    Where weights rotate, a rank computes a part with one slice after another; in place, with one
    half of every slice, then with the other.
    """

    model: LlamaConfig
    step: StepCounts
    batch: MicroBatch
    device: Device

    @property
    def _rotates(self) -> bool:
        return isinstance(self.step.shape, RotationShape)

    @cached_property
    def per_unit(self) -> tuple[UnitSeconds, ...]:
        """The times of every unit, or of all slices of every part together, in forward order."""
        shape = self.step.shape
        computed = [[part.method for part in spec.parts] for spec in unit_specs(self.model)]
        if self._rotates:
            computed = [[method] for methods in computed for method in methods]
        again = {index for group in shape.recomputed for index in group}
        found = []
        for index, methods in enumerate(computed):
            trained = self._trained(index) if index >= shape.first_trained else None
            if methods == ["look_up"]:
                whole = self._embedding(trained)
            elif methods == ["loss"]:
                whole = self._loss(trained)
            else:
                products = sum(self._product_flops[method] for method in methods)
                attention = self._attention_flops if "attention" in methods else 0.0
                whole = self._forward_and_back(products, attention, trained, index in again)
            found.append(self._in_slices(whole, shape.num_slices * len(shape.halves(index))))
        return tuple(found)

    @cached_property
    def forward_seconds(self) -> float:
        """Compute time of the forward of one micro-batch."""
        return sum(unit[Verb.FORWARD] + unit.get(Verb.LOSS, 0.0) for unit in self.per_unit)

    @cached_property
    def seconds(self) -> float:
        """Compute time of one micro-batch."""
        return sum(sum(unit.values()) for unit in self.per_unit)

    @cached_property
    def attention_seconds(self) -> float:
        """Time of a forward of a block's attention, without its products with weights."""
        return self._seconds(self._attention_flops)

    def memory_seconds(self, num_bytes: float) -> float:
        """Time of memory-bound work that reads and writes this many bytes."""
        return num_bytes / self.device.memory_bytes_per_second

    def collect_seconds(
        self, strategy: Strategy, precision: PrecisionConfig, trainable_numel: int
    ) -> float:
        """Time to collect gradients, one by one, in the training thread.

        Where weights rotate, to add them to the received sums, and complete sums to the
        accumulator. The first rank of a pass writes its gradients without reading the buffer's old
        content.
        """
        compute, wire = BYTES_OF[precision.compute], BYTES_OF[precision.wire]
        accumulate, degree = BYTES_OF[precision.accumulate], self.step.shape.num_slices
        of_element: float = compute + (wire if strategy.grads > 1 else 2 * accumulate)
        if self._rotates:
            of_element = compute + 2 * wire - wire / degree + (wire + 2 * accumulate) / degree
        return self.memory_seconds(trainable_numel * of_element)

    def update_seconds(
        self, strategy: Strategy, precision: PrecisionConfig, trainable_numel: int
    ) -> float:
        of_element = (
            2 * BYTES_OF[precision.accumulate]
            + 2 * bytes_of(adamw_states(precision))
            + BYTES_OF[precision.compute]
        )
        return self.memory_seconds(trainable_numel // strategy.optim * of_element)

    def _seconds(self, flops: float) -> float:
        return flops / self.device.sustained_flops

    def _trained(self, index: int) -> float:
        """The share that trains of the weights that a unit or part reads."""
        # A tied head borrows them: they are of the last buffer's unit.
        units = {self.step.buffers[half[-1]].unit for half in self.step.shape.halves(index)}
        return sum(unit.trainable_numel for unit in units) / sum(unit.numel for unit in units)

    @property
    def _residual_bytes(self) -> int:
        return self.batch.tensor_bytes(self.model.hidden_size)

    def _embedding(self, trained: float | None) -> UnitSeconds:
        backward = 0 if trained is None else 3 * self._residual_bytes
        return {
            Verb.FORWARD: self.memory_seconds(2 * self._residual_bytes),
            Verb.BACKWARD: self.memory_seconds(backward),
        }

    @cached_property
    def _attention_flops(self) -> float:
        """Of a forward of a block's attention, without weights, as of products with weights."""
        config, tokens = self.model, self.batch.num_tokens
        query = config.num_attention_heads * config.kv_channels
        own, others = self.device.attention_flops, self.device.sustained_flops
        return 2.0 * tokens * 2 * self.batch.seq_length * query * (others / (own or others))

    @cached_property
    def _product_flops(self) -> dict[str, float]:
        """Of a forward of the parts of a block, their products with weights, by method."""
        block, found = unit_specs(self.model)[1], {}
        for part in block.parts:
            shapes = (block.shapes[name] for name in part.cuts)
            weights = sum(math.prod(shape) for shape in shapes if len(shape) > 1)
            found[part.method] = 2.0 * self.batch.num_tokens * weights
        return found

    def _forward_and_back(
        self, products: float, attention: float, trained: float | None, recomputed: bool
    ) -> UnitSeconds:
        """Of FLOPs of a forward; `trained` is the share of the weights that trains.

        None: backward does not reach them.
        """
        forward = self._seconds(products + attention)
        if trained is None:
            return {Verb.FORWARD: forward}
        recompute = self.model.recompute
        core = attention if recompute is not None and recompute.core_attention else 0.0
        again = self._seconds(products) if self.model.keeps_core else forward
        backward = self._seconds((1 + trained) * products + 2 * attention + core)
        return {
            Verb.FORWARD: forward,
            Verb.RECOMPUTE: again if recomputed else 0.0,
            Verb.BACKWARD: _FIRST_GRADIENT_SHARE * backward,
            Verb.GRADIENTS: (1 - _FIRST_GRADIENT_SHARE) * backward,
        }

    def _loss(self, trained: float | None) -> UnitSeconds:
        """Head and loss: the logits, and as much again for the gradients of each operand."""
        products = 2.0 * self.batch.num_tokens * self.model.vocab_size * self.model.hidden_size
        logits = self._seconds(products)
        shape = self.step.shape
        if isinstance(shape, RotationShape):
            # No gradients in forward, so backward recomputes the logits.
            found = self._forward_and_back(products, 0.0, trained, recomputed=False)
            if trained is not None:
                found[Verb.BACKWARD] += logits
            return found
        passes = 1.0 if trained is None else 2.0 + trained
        if not shape.grads_in_forward:
            return {Verb.FORWARD: passes * logits}
        first_chunk = min(1.0, LOSS_CHUNK_TOKENS / self.batch.num_tokens) * logits
        loss = passes * logits - first_chunk
        return {Verb.FORWARD: passes * logits - loss, Verb.LOSS: loss}

    def _in_slices(self, whole: UnitSeconds, number: int) -> UnitSeconds:
        """The times with the extra cost of computing in this number of slices."""
        piece = self.device.piece_seconds
        adding = self.memory_seconds(3 * self._residual_bytes)  # to the output, or its gradient
        forward = (number - 1) * (piece * _FORWARD_SHARE + adding)
        backward = (number - 1) * (piece * (1 - _FORWARD_SHARE) + adding)
        found = {**whole, Verb.FORWARD: whole[Verb.FORWARD] + forward}
        if whole.get(Verb.RECOMPUTE):
            found[Verb.RECOMPUTE] = whole[Verb.RECOMPUTE] + forward
        if whole.get(Verb.BACKWARD):
            found[Verb.GRADIENTS] = whole.get(Verb.GRADIENTS, 0.0) + backward
        return found


def coding_seconds(device: Device, num_bytes: float) -> float:
    """Time to encode or decode with this memory traffic, at the machine file's rate if any."""
    rate = device.coding_bytes_per_second
    if rate is None:
        share = 1.0 if device.cores is None else _CODING_SHARE
        rate = share * device.memory_bytes_per_second
    return num_bytes / rate


def device_of(machine: Machine) -> Device:
    """The device of a machine; `UserError` if its file has none."""
    if machine.device is None:
        raise UserError(
            f"machine {machine.name}: device is missing, which planning needs: add an object with "
            "name, memory_bytes, reserved_bytes, peak_flops, sustained_flops and "
            "memory_bytes_per_second"
        )
    return machine.device
