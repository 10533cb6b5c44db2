"""Compute time of a rank in a micro-batch and in an update, unit by unit, or part by part."""

# In: a model, a micro-batch and the rates of a device. Out: seconds of every unit's forward,
# recomputation and backward, and of updates and copies.
#
#     matrix products       FLOPs (model/units.py) / sustained FLOP/s; attention is counted in full,
#                           over a FLOP/s figure of its own where the device has one
#     memory-bound work     bytes / memory bandwidth
#     backward              two forwards: one for the gradients of inputs, one for those of trained
#                           weights; none below the first trained unit; part of the head's forward
#
#     collect a gradient    read it, write it; if it is added to an accumulator, read that too
#     update                read the gradient twice (norm, update), read and write master and
#                           moments, write the parameter; with Muon counted as AdamW's
#     (de)quantize          bytes of all operations (comm_costs.py) / a bandwidth of their own

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
from paro.planning.step_counts import StepCounts
from paro.precision import BYTES_OF
from paro.spec.run_spec import RunSpec
from paro.spec.states import adamw_states, averages, bytes_of
from paro.step.actions import ActionKind, StepShape
from paro.strategy import Strategy

# Share of the memory bandwidth at which CPU ranks quantize, where the machine file gives no rate:
# measured 0.33 to 0.54, since quantization takes many small operations.
_CODING_SHARE = 0.4
_FIRST_GRADIENT_SHARE = 0.1  # share of a block's backward before its first gradient exists
_FORWARD_SHARE = 1 / 3  # forward's share of the cost of an extra slice; backward has the rest

# Training-thread seconds of a unit's actions in a micro-batch, without collecting its gradients.
UnitSeconds = dict[ActionKind, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class ComputeTimes:
    """The compute time of a model's micro-batch on a device.

    Where weights rotate, a rank computes a part with one slice after another. In place it computes
    with the first half of every slice, then with the second half of every slice.
    """

    run: RunSpec  # a run with these micro-batches, under any strategy
    step: StepCounts
    device: Device

    @cached_property
    def model(self) -> LlamaConfig:
        return self.run.config

    @cached_property
    def per_unit(self) -> tuple[UnitSeconds, ...]:
        """The times of every unit, or of every part with all its slices, in forward order."""
        shape = self.step.shape
        computed: list[tuple[PartSpec, ...]] = [spec.parts for spec in unit_specs(self.model)]
        if shape.num_slices > 1:
            computed = [(part,) for parts in computed for part in parts]
        again = frozenset(chain.from_iterable(shape.recomputed))
        return tuple(self._times(n, parts, n in again) for n, parts in enumerate(computed))

    @cached_property
    def forward_seconds(self) -> float:
        """The compute time of the forward of a micro-batch."""
        return sum(
            unit[ActionKind.FORWARD] + unit.get(ActionKind.LOSS, 0.0) for unit in self.per_unit
        )

    @cached_property
    def seconds(self) -> float:
        """The compute time of a micro-batch."""
        return sum(sum(unit.values()) for unit in self.per_unit)

    def attention_seconds(self, unit: int) -> float:
        """Compute the time of core attention (no products with weights) in a block's forward."""
        recomputed = unit in chain.from_iterable(self.step.shape.recomputed)
        return self._seconds(self._attention_flops(recomputed))

    def memory_seconds(self, num_bytes: float) -> float:
        """Compute the time of memory-bound work that reads and writes this many bytes."""
        return num_bytes / self.device.memory_bytes_per_second

    def collect_seconds(self, strategy: Strategy, numel: int) -> float:
        """Compute the time to collect gradients, one by one, in the training thread.

        Where weights rotate, gradients are added to received sums, and complete sums to the
        accumulator. The first rank of a pass only writes its gradients: it has received no sum.
        """
        precision, compute = self.run.precision, self.run.compute_bytes
        wire, accumulate = BYTES_OF[precision.wire], BYTES_OF[precision.accumulate]
        degree = self.step.shape.num_slices
        of_element: float = compute + (wire if strategy.grads > 1 else 2 * accumulate)
        if degree > 1:
            of_element = compute + 2 * wire - wire / degree + (wire + 2 * accumulate) / degree
        return self.memory_seconds(numel * of_element)

    def update_seconds(self, strategy: Strategy, numel: int) -> float:
        precision = self.run.precision
        states = (*adamw_states(precision), *averages(precision))
        twice = BYTES_OF[precision.accumulate] + bytes_of(states)
        of_element = 2 * twice + self.run.compute_bytes
        return self.memory_seconds(numel // strategy.optim * of_element)

    def _seconds(self, flops: float) -> float:
        return flops / self.device.sustained_flops

    @property
    def _residual_bytes(self) -> int:
        return self.run.tensor_bytes(self.model.hidden_size)

    def _attention_flops(self, recomputed: bool) -> float:
        """Count FLOPs of core attention in forward, scaled as if run at the common rate."""
        config, tokens, device = self.model, self.run.num_tokens, self.device
        query = config.num_attention_heads * config.kv_channels
        in_parts = self.run.context.ring > 1 or (config.keeps_core and recomputed)
        core = device.documents_flops if self.run.apart else in_parts and device.parts_flops
        core, common = core or device.attention_flops, device.sustained_flops
        return 2.0 * tokens * 2 * self.run.seq_length * query * (common / (core or common))

    @cached_property
    def _product_flops(self) -> dict[str, float]:
        """The FLOPs of a forward's products with weights, by method of the model."""
        embedding, block, *_ = unit_specs(self.model)
        shapes, flops = {**embedding.shapes, **block.shapes}, {}
        for part in (*embedding.parts, *block.parts):
            weights = (math.prod(shapes[name]) for name in part.cuts if len(shapes[name]) > 1)
            flops[part.method] = 2.0 * self.run.num_tokens * sum(weights)
        return flops | {"loss": flops["look_up"]}

    def _of_slices(self, index: int) -> tuple[float, float]:
        """Compute the time that slices add to a part's forward, and to its backward."""
        number = self.step.shape.num_slices * len(self.step.shape.halves(index))
        piece = self.device.piece_seconds
        # Every further slice adds its result to the output, or to the input's gradient.
        adding = self.memory_seconds(3 * self._residual_bytes)
        shares = (_FORWARD_SHARE, 1 - _FORWARD_SHARE)
        forward, backward = ((number - 1) * (piece * share + adding) for share in shares)
        return forward, backward

    def _times(self, index: int, parts: Sequence[PartSpec], recomputed: bool) -> UnitSeconds:
        """Compute the times of a unit, or of a part in slices; a block begins with attention."""
        shape, method = self.step.shape, parts[0].method
        more, more_back = self._of_slices(index)
        reached = index >= shape.first_trained  # whether the unit has a backward
        if method == "look_up":
            forward = self.memory_seconds(2 * self._residual_bytes) + more
            backward = self.memory_seconds(3 * self._residual_bytes)
            of_back = {ActionKind.BACKWARD: backward, ActionKind.GRADIENTS: more_back}
            return {ActionKind.FORWARD: forward, **(of_back if reached else {})}
        products = sum(self._product_flops[part.method] for part in parts)
        attention = self._attention_flops(recomputed) if method == "attention" else 0.0
        forward = self._seconds(products + attention)
        if not reached:
            return {ActionKind.FORWARD: forward + more}
        # A tied head borrows the embedding's weights: look up the unit that owns the buffer.
        units = {self.step.buffers[half[-1]].unit for half in shape.halves(index)}
        trained = sum(unit.trainable.numel for unit in units) / sum(unit.numel for unit in units)
        if method == "loss" and isinstance(shape, StepShape):
            # The gradients of each operand take as long as the forward.
            loss, chunk = (2 + trained) * forward, self.run.loss_chunk
            of_chunk = chunk / self.run.num_tokens
            later = loss - of_chunk * forward if shape.grads_in_forward else 0.0
            return {ActionKind.FORWARD: loss - later, ActionKind.LOSS: later}
        recompute = self.model.recompute
        again = self._seconds(products) if self.model.keeps_core else forward
        core = attention if recompute is not None and recompute.core_attention else 0.0
        backward = self._seconds((1 + trained) * products + 2 * attention + core)
        # Where weights rotate, the loss makes no gradients in forward; backward recomputes logits.
        logits = forward if method == "loss" else 0.0
        return {
            ActionKind.FORWARD: forward + more,
            ActionKind.RECOMPUTE: again + more if recomputed else 0.0,
            ActionKind.BACKWARD: _FIRST_GRADIENT_SHARE * backward + logits,
            ActionKind.GRADIENTS: (1 - _FIRST_GRADIENT_SHARE) * backward + more_back,
        }


def coding_seconds(device: Device, num_bytes: float) -> float:
    """Compute the time to quantize or dequantize with this memory traffic."""
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
