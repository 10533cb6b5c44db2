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
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from model.config import LOSS_CHUNK_TOKENS, LlamaConfig
from model.units import recomputed_groups, unit_specs
from paro.optim.states import adamw_states, bytes_of
from paro.planning.cost_model import UnitSize, first_trained
from paro.planning.machine.machine import Device
from paro.planning.micro_batch import MicroBatch
from paro.planning.rotation import unit_parts
from paro.planning.step.passes import StepCounts
from paro.planning.units import loss_writes_gradients
from paro.precision import BYTES_OF, PrecisionConfig
from paro.step.actions import Verb
from paro.step.rotation_plan import RotationShape
from paro.strategy import Strategy

# Share of the memory bandwidth at which CPU ranks make codes, where the machine file gives no rate:
# measured 0.33 to 0.54, since codes take many small operations.
_CODING_SHARE = 0.4
_FIRST_GRADIENT_SHARE = 0.1  # share of a block's backward before its first gradient exists


# Training-thread time of a unit's actions in a micro-batch, without collecting its gradients.
UnitSeconds = Mapping[Verb, float]
_FORWARD_SHARE = 1 / 3  # share of an extra slice's cost; backward has twice the products


class Flops(NamedTuple):
    """FLOPs of a forward, at the rate of products with weights."""

    products: float
    attention: float = 0.0  # its products without weights


@dataclass(frozen=True, kw_only=True, eq=False)
class Computing:
    """Compute time of a model's micro-batch on a device."""

    model: LlamaConfig
    units: tuple[UnitSize, ...]
    batch: MicroBatch
    device: Device

    @cached_property
    def first_trained(self) -> int:
        return first_trained(self.units)

    @cached_property
    def per_unit(self) -> tuple[UnitSeconds, ...]:
        """The times of every unit, in forward order."""
        groups = recomputed_groups(unit_specs(self.model), self.first_trained)
        recomputed = {index for group in groups for index in group}
        attention, mlp, first = self.of_attention, self.of_mlp, self.first_trained
        flops = Flops(attention.products + mlp.products, attention.attention)
        blocks = (
            self.forward_and_back(
                flops,
                trained=unit.trainable_numel / unit.numel if index >= first else None,
                recomputed=index in recomputed,
            )
            for index, unit in enumerate(self.units[1:-1], start=1)
        )
        return (self._embedding(), *blocks, self._head())

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
        return self._seconds(self.of_attention.attention)

    @property
    def residual_bytes(self) -> int:
        return self.batch.tensor_bytes(self.model.hidden_size)

    def memory_seconds(self, num_bytes: float) -> float:
        """Time of memory-bound work that reads and writes this many bytes."""
        return num_bytes / self.device.memory_bytes_per_second

    def collect_seconds(
        self, strategy: Strategy, precision: PrecisionConfig, trainable_numel: int
    ) -> float:
        """Time to collect gradients, one by one, in the training thread."""
        compute, wire = BYTES_OF[precision.compute], BYTES_OF[precision.wire]
        written = wire if strategy.grads > 1 else 2 * BYTES_OF[precision.accumulate]
        return self.memory_seconds(trainable_numel * (compute + written))

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

    def _embedding(self) -> UnitSeconds:
        residual = self.residual_bytes
        backward = 3 * residual if self.first_trained == 0 else 0
        return {
            Verb.FORWARD: self.memory_seconds(2 * residual),
            Verb.BACKWARD: self.memory_seconds(backward),
        }

    @cached_property
    def of_attention(self) -> Flops:
        """FLOPs of the forward of a block's attention."""
        config, tokens = self.model, self.batch.num_tokens
        query = config.num_attention_heads * config.kv_channels
        own, others = self.device.attention_flops, self.device.sustained_flops
        return Flops(
            products=2.0 * tokens * self._weights("attention"),
            attention=2.0 * tokens * 2 * self.batch.seq_length * query * (others / (own or others)),
        )

    @cached_property
    def of_mlp(self) -> Flops:
        """FLOPs of the forward of a block's MLP."""
        return Flops(products=2.0 * self.batch.num_tokens * self._weights("mlp"))

    @cached_property
    def of_logits(self) -> Flops:
        """FLOPs of the output layer in forward."""
        config = self.model
        return Flops(products=2.0 * self.batch.num_tokens * config.vocab_size * config.hidden_size)

    def _weights(self, method: str) -> int:
        """Elements of the matrices of a part of a block."""
        block = unit_specs(self.model)[1]
        (part,) = (part for part in block.parts if part.method == method)
        shapes = (block.shapes[name] for name in part.cuts)
        return sum(math.prod(shape) for shape in shapes if len(shape) > 1)

    def forward_and_back(
        self, flops: Flops, *, trained: float | None, recomputed: bool
    ) -> UnitSeconds:
        """Times of products and attention; `trained` is the share of the weights that trains.

        None: backward does not reach them.
        """
        forward = self._seconds(flops.products + flops.attention)
        if trained is None:
            return {Verb.FORWARD: forward}
        recompute = self.model.recompute
        core = flops.attention if recompute is not None and recompute.core_attention else 0.0
        again = self._seconds(flops.products) if self.model.keeps_core else forward
        backward = self._seconds((1 + trained) * flops.products + 2 * flops.attention + core)
        return {
            Verb.FORWARD: forward,
            Verb.RECOMPUTE: again if recomputed else 0.0,
            Verb.BACKWARD: _FIRST_GRADIENT_SHARE * backward,
            Verb.GRADIENTS: (1 - _FIRST_GRADIENT_SHARE) * backward,
        }

    def _head(self) -> UnitSeconds:
        passes = 1.0
        if self.first_trained < len(self.units):  # gradients of the input, and of what trains
            holder = self.units[0 if self.model.tie_embeddings_and_output_weights else -1]
            passes = 2.0 + holder.trainable_numel / holder.numel
        logits = self._seconds(self.of_logits.products)
        if not loss_writes_gradients(self.model, self.units):
            return {Verb.FORWARD: passes * logits}
        first_chunk = min(1.0, LOSS_CHUNK_TOKENS / self.batch.num_tokens) * logits
        loss = passes * logits - first_chunk
        return {Verb.FORWARD: passes * logits - loss, Verb.LOSS: loss}


def coding_seconds(device: Device, num_bytes: float) -> float:
    """Time to encode or decode with this memory traffic, at the machine file's rate if any."""
    rate = device.coding_bytes_per_second
    if rate is None:
        share = 1.0 if device.cores is None else _CODING_SHARE
        rate = share * device.memory_bytes_per_second
    return num_bytes / rate


@dataclass(frozen=True, kw_only=True, eq=False)
class RotatingComputing(Computing):
    """Compute time of a micro-batch in slices; `units` are those of gathered parameters.

    A rank computes a part with one slice after another; in place, with one half of every slice,
    then with the other.
    """

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
            found.append(self._in_slices(whole, self.rotation.num_slices * len(shape.halves)))
        return tuple(found)

    def collect_seconds(
        self, strategy: Strategy, precision: PrecisionConfig, trainable_numel: int
    ) -> float:
        """Time to add gradients to the received sums, and complete sums to the accumulator.

        The first rank of a pass writes its gradients without reading the buffer's old content.
        """
        compute, wire = BYTES_OF[precision.compute], BYTES_OF[precision.wire]
        accumulate, degree = BYTES_OF[precision.accumulate], self.rotation.num_slices
        in_ring = compute + 2 * wire - wire / degree
        at_owner = (wire + 2 * accumulate) / degree
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
        piece = self.device.piece_seconds
        adding = self.memory_seconds(3 * self.residual_bytes)  # to the output, or its gradient
        forward = (number - 1) * (piece * _FORWARD_SHARE + adding)
        backward = (number - 1) * (piece * (1 - _FORWARD_SHARE) + adding)
        found = {**whole, Verb.FORWARD: whole[Verb.FORWARD] + forward}
        if whole.get(Verb.RECOMPUTE):
            found[Verb.RECOMPUTE] = whole[Verb.RECOMPUTE] + forward
        if whole.get(Verb.BACKWARD):
            found[Verb.GRADIENTS] = whole.get(Verb.GRADIENTS, 0.0) + backward
        return found
