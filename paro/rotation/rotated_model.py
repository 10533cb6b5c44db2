"""Rotated Tensor Parallelism: a model computes with weight slices, which move round a ring."""

# FSDP2 all-gathers a module's weights before its forward and again before its backward. With
# --paro-materialize rotate no weights are gathered: a rank of d ranks has 1/d of every matrix, its
# slice, computes with one slice at a time, and sends it on round a ring of the ranks:
#
#     ring step k, forward      rank r computes with the slice of rank r - k, while the shift of it
#                               to rank r + 1 is in flight
#     backward                  in reverse; the gradient of a slice moves with it, and every rank
#                               adds its part, until slice and gradient are at the owner again
#
# A slot is a buffer for one slice: SHARD is the rank's own parameter shard, SPARE and SPARE_2 are
# receive buffers (double buffering), GRAD and GRAD_2 have sums of gradients. The step schedule
# (paro/step: rotating.py, slices.py) says which slots to allocate, shift and compute with, and
# calls the methods of the unit in that order.
#
# A part of the model wraps one method of a module, such as a block's MLP, and computes d partial
# results of this rank's micro-batch, one with each slice. The module's `join_METHOD` adds them up:
#
#   for step in range(d):      # for each half, if slices are cut in halves
#       policy.before_forward  # double-buffered: the slice is sent on while it computes
#       run the method         # with views of the slice as the module's weights
#       policy.after_forward   # single-buffered: the slice is sent on, the next one received
#
# In backward hooks of autograd run the steps in reverse order:
#
#   gradient of a slice's output    policy.before_backward: ends the previous step; this slice's
#                                   weights are here, the next slice is on the way back
#   gradients of a slice's weights  policy.first_gradient, last_gradient: added to the slice's sum,
#                                   which moves on when the step ends
#   gradient of the part's input    policy.after_backward: ends the last step
#
# The policy (paro/step/rotating.py) decides the actions at an event. Autograd runs the most recent
# operations first and AccumulateGrad nodes before all others: all gradients of a slice arrive
# before the next step begins. If a forward is recomputed (non-reentrant checkpointing), backward
# runs the hooks of the first forward, whose leaves get the gradients; the recomputation only
# restores tensors that were not saved.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial, partialmethod
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from model.matmul import store_grad
from model.units import PartSpec, UnitSpec
from paro.collectives.shifts import Ring, ShiftDirection
from paro.distributed.comm_stream import DONE, Event
from paro.distributed.timers import profile_range
from paro.sharding.buffers import TORCH_TYPES, ElasticBuffer
from paro.sharding.distributed_model import DistributedModel, Phase, UnitGradSink
from paro.sharding.sharded_unit import ShardedUnit, bind_empty
from paro.sharding.shards import ShardingContext, UnitShards
from paro.spec.sharding_spec import ShardingSpec
from paro.step.rotating import RingStep, RotationPolicy
from paro.step.slices import SliceSlot
from paro.topology import WaitKind


@dataclass(eq=False)
class RotatedModel(DistributedModel):
    """A model of which each rank holds only slices and the replicated norms.

    A rank computes its own micro-batch with its current slice of a part and sends the slice on.
    A `RotatingPart` does so when the model calls a part; `policy` decides when slices are sent and
    gradients reduced. `units` are made by `make_rotated_units`.
    """

    policy: RotationPolicy
    unit_specs: Sequence[UnitSpec]

    def __post_init__(self) -> None:
        super().__post_init__()
        parts = [(spec, part) for spec in self.unit_specs for part in spec.parts]
        self._parts = [RotatingPart(index, *part, self) for index, part in enumerate(parts)]
        # Autograd keeps leaves alive, and their hooks reference the parts.
        self._removals += [part.leaves.clear for part in self._parts]
        parameters = dict(self.model.named_parameters())
        for unit in self.trainable_units:
            if isinstance(unit, ShardedUnit):
                self._collect_gradients(unit, parameters, by_matmuls=False)


def make_rotated_units(
    model: nn.Module, specs: Sequence[ShardingSpec], context: ShardingContext, ring: Ring
) -> list[UnitShards]:
    """Return the buffers of a model built on the meta device; only shards are allocated.

    Replicated parameters (norms) come first: the next step needs all of them at its start, so they
    are updated and all-gathered first.
    """
    bound = bind_empty(model, specs, context)
    norms = [ShardedUnit(spec, context) for spec in specs if spec.unit.replicated]
    for norm in norms:
        norm.bind(bound)
    weights = (spec for spec in specs if not spec.unit.replicated)
    return [*norms, *(RotatingUnit(spec, context, ring) for spec in weights)]


class RotatingUnit(UnitShards):
    """A unit with 1/d of its trainable or of its frozen matrices on each of d ranks of a ring.

    Slices circulate by ring shifts in place of an all-gather. `param_shard` is this rank's slice;
    slots are buffers for the slices of other ranks.
    """

    def __init__(self, spec: ShardingSpec, context: ShardingContext, ring: Ring) -> None:
        super().__init__(spec, context)
        self._ring = ring
        layout, numel = spec.layout, spec.layout.numel // ring.size
        ranges = [(index * numel, (index + 1) * numel) for index in range(ring.size)]
        self._ranges = [tuple(layout.chunk_ranges(*of_slice)) for of_slice in ranges]
        self._gaps = [  # the padding in each slice
            [(low - begin, high - begin) for low, high in layout.gaps(begin, end)]
            for begin, end in ranges
        ]
        slots = spec.slots(context.device.type)
        shard = spec.param_numel, spec.param_dtype
        assert slots[SliceSlot.SPARE] == shard, f"{self.name}: {slots} for slices of {shard}"
        self._spares = {
            slot: ElasticBuffer(
                size, dtype=TORCH_TYPES[kind], tally=context.counters.slices, device=context.device
            )
            for slot, (size, kind) in slots.items()
        }
        self._slots = {slot: spare.values for slot, spare in self._spares.items()}
        self._slots[SliceSlot.SHARD] = self.param_shard
        self._views: dict[tuple[int, SliceSlot], dict[str, Tensor]] = {}  # {(step, slot): views}
        self._arrivals: dict[WaitKind, Event] = {}  # of the weights and gradients under way

    # Slices #

    def views(self, step: int, slot: SliceSlot) -> dict[str, Tensor]:
        """Return the parameters of the slice that is used in a ring step, by name.

        They are views of the slot, valid until the slot is freed.
        """
        if (step, slot) not in self._views:
            values, index = self._slots[slot], self._ring.owner_of(step)
            begin = index * values.numel()
            self._views[step, slot] = {
                part.chunk.name: values[part.offset - begin :][: part.high - part.low].view(
                    part.chunk.sizes
                )
                for part in self._ranges[index]
            }
        return self._views[step, slot]

    def starts(self, step: int) -> dict[str, tuple[int, ...]]:
        """Return where the slice of a ring step begins in each parameter: indices by dim."""
        parts = self._ranges[self._ring.owner_of(step)]
        return {part.chunk.name: part.chunk.offsets for part in parts}

    def grad_view(self, step: int, slot: SliceSlot, name: str) -> tuple[Tensor, bool]:
        """Return (view of the gradient sum that rotates with a slice, whether to add to it)."""
        return self.views(step, slot)[name], step + 1 < self._ring.size

    # Actions, which `ActionKind` describes #

    wait = UnitShards.wait_for_updated_params

    def grad_sync(self) -> None:
        with profile_range(f"reduce:{self.name}"):
            super().grad_sync()

    def allocate_slot(self, slot: SliceSlot) -> None:
        """Allocate the memory of a slot."""
        self._spares[slot].alloc()

    def free_slot(self, slot: SliceSlot) -> None:
        """Free the memory of a slot."""
        self._spares[slot].free()

    def copy(self, source: SliceSlot, to: SliceSlot) -> None:
        """Copy a slice from one slot to another."""
        self._slots[to].copy_(self._slots[source])

    def _shift(
        self,
        kind: WaitKind,
        direction: ShiftDirection,
        source: SliceSlot,
        to: SliceSlot,
        scratch: SliceSlot = SliceSlot.SCRATCH,
    ) -> None:
        """Queue a shift: send the values in `source` to a neighbour, receive others into `to`."""
        values, slots = self._slots[source], self._slots
        with self.context.exposed_timer.submitting(kind):  # without overlap the shift runs here
            if source == to:
                arrival = self._ring.shift_in_place(values, slots[scratch], direction)
            else:
                arrival = self._ring.shift(values, slots[to], direction)
        self._arrivals[kind] = arrival

    def _wait_arrived(self, kind: WaitKind) -> None:
        """Wait for the values that the last shift of this kind brings."""
        self.context.exposed_timer.wait(kind, self._arrivals.pop(kind, DONE))

    shift = partialmethod(_shift, WaitKind.GATHER, ShiftDirection.CLOCKWISE)
    shift_back = partialmethod(_shift, WaitKind.GATHER, ShiftDirection.COUNTER_CLOCKWISE)
    wait_shifted = partialmethod(_wait_arrived, WaitKind.GATHER)
    shift_grads = partialmethod(_shift, WaitKind.REDUCE, ShiftDirection.COUNTER_CLOCKWISE)
    wait_grads = partialmethod(_wait_arrived, WaitKind.REDUCE)

    def zero_gaps(self, slot: SliceSlot, step: int) -> None:
        """Set the padding of a gradient's slice to 0."""
        for low, high in self._gaps[self._ring.owner_of(step)]:
            self._slots[slot][low:high].zero_()

    def accumulate(self, slot: SliceSlot) -> None:
        """Add the gradient in a slot to this rank's shard."""
        store_grad(self._slots[slot], self.grad_shard, adds=not self._fresh)
        self._fresh = False


class RotatingPart:
    """Replacement of a module's method that computes with one slice of its weights at a time."""

    def __init__(self, index: int, unit: UnitSpec, spec: PartSpec, model: RotatedModel) -> None:
        self.module = module = model.model.get_submodule(unit.name)
        self.unit = unit
        self.spec = spec
        self._model = model
        self._policy = policy = model.policy
        self._ring_steps = policy.shape.ring_steps(index)
        # {parameter name in the model: parameter name in the module}
        self._attributes = dict(zip(unit.cuts_of(spec), spec.cuts, strict=True))
        self._of_slice = getattr(module, spec.of_slice)
        self._join = getattr(module, f"join_{spec.method}")
        self._whole = {name: getattr(module, name) for name in spec.cuts}
        for name in spec.cuts:
            if name not in module._parameters:  # a tied head's weight is a plain attribute
                delattr(module, name)
                module.register_parameter(name, None)
        # {(buffer, step, slot): {name: leaf}}, made once: the storage of a slot is freed and
        # allocated again, but views of the storage stay valid.
        self.leaves: dict[tuple[int, int, SliceSlot], dict[str, nn.Parameter]] = {}
        replicated = map(module.get_parameter, spec.replicated)
        buffers = chain.from_iterable(policy.shape.halves(index))
        trains = any(model.units[buffer].trainable for buffer in buffers)
        self._trains = trains or any(parameter.requires_grad for parameter in replicated)
        setattr(module, spec.method, self)

    def __call__(self, x: Tensor, *rest: Any) -> Tensor:
        in_forward = self._model.phase is Phase.FORWARD
        runs_again = in_forward and self.unit.recomputed_from is not None
        needs_grads = torch.is_grad_enabled() and (self._trains or x.requires_grad)
        run = partial(self._run, backward_follows=needs_grads and not runs_again)
        if in_forward and x.requires_grad:
            x.register_hook(lambda _: self._model.carry_out(self._policy.after_backward()))
        with profile_range(f"rotate:{self.unit.label_of(self.spec)}"):
            out: Tensor = self._join((partial(run, at) for at in self._ring_steps), x, *rest)
        return out

    def _run(self, at: RingStep, x: Tensor, *rest: Any, backward_follows: bool) -> Any:
        carry_out, policy = self._model.carry_out, self._policy
        carry_out(policy.before_forward(at, backward_follows=backward_follows))
        self._use_slice(at)
        try:
            out = self._of_slice(x, *rest)
        finally:  # a complete recomputation is stopped by an exception
            self.module._parameters.update(self._whole)
        for tensor in out if isinstance(out, tuple) else (out,):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: carry_out(policy.before_backward(at)))
        carry_out(policy.after_forward(at))
        return out

    def _use_slice(self, at: RingStep) -> None:
        """Replace the module's weights by the views of a slice."""
        starts: dict[str, int] = self.module.starts  # type: ignore[assignment]
        for buffer in self._policy.shape.halves(at.part)[at.half]:
            unit, slot = self._unit(buffer), self._policy.slices[buffer].slot(at.step)
            key = buffer, at.step, slot
            if key not in self.leaves:
                self.leaves[key] = dict(self._leaves_of(*key))
            self.module._parameters.update(self.leaves[key])
            for name, start in unit.starts(at.step).items():
                attribute = self._attributes[name]
                starts[attribute] = start[self.spec.cuts[attribute]]

    def _unit(self, buffer: int) -> RotatingUnit:
        unit = self._model.units[buffer]
        assert isinstance(unit, RotatingUnit), f"{unit.name} does not rotate"
        return unit

    def _leaves_of(
        self, buffer: int, step: int, slot: SliceSlot
    ) -> Iterator[tuple[str, nn.Parameter]]:
        unit, grad_slot = self._unit(buffer), self._policy.slices[buffer].grad_slot(step)
        views = unit.views(step, slot)
        for name, view in views.items():
            # `data` has no version check: the slot is overwritten while autograd holds the leaf.
            leaf = nn.Parameter(view.data, requires_grad=unit.trainable)
            if unit.trainable:
                grad = partial(unit.grad_view, step, grad_slot, name)
                sink = UnitGradSink(model=self._model, number=buffer, total=len(views), view=grad)
                leaf.grad_sink = sink  # type: ignore[attr-defined]
                leaf.register_post_accumulate_grad_hook(sink.take)
            yield self._attributes[name], leaf
