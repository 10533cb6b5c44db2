"""A part of the model, such as an MLP, computed slice by slice while its weights rotate."""

# [Note: backward of a pass]
# In backward a hook on the output of a step fires when the output gradient has arrived, and a hook
# on the step's own view of the input fires when the input gradient is computed (or left to a later
# step, if slices share a norm). Autograd runs the most recent operations first and accumulates leaf
# gradients immediately: so steps run in reverse order, and all gradients of a step arrive before
# the next begins. A step also ends when the step before it begins or backward ends, since the input
# of a step may not need gradients.
#
# If a forward is recomputed (non-reentrant checkpointing), backward runs the hooks of the first
# forward, whose leaves get the gradients; the second one restores the tensors that were not saved.
#
# The leaves of a step are created once per slot that its slice may be stored in: the slot's
# storage is freed and reallocated, its views stay valid.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from model.matmul import GradSink
from model.units import PartSpec, UnitSpec
from paro.distributed.profile_range import profile_range
from paro.rotation.rotating_unit import RotatingUnit
from paro.sharding.distributed_model import MicroBatchState, Phase

# The units of a part's trainable and frozen matrices, or of half of every slice of them.
Half = tuple[RotatingUnit, ...]
Position = tuple[int, int]  # the index of a half, and a step of its rotation


class RotatingPart:
    """Replaces a method of a unit's module; `halves` hold the method's matrices.

    If slices are halved, the halves rotate one after the other; in backward the last half is first.
    """

    def __init__(
        self,
        module: nn.Module,
        unit: UnitSpec,
        spec: PartSpec,
        halves: Sequence[Half],
        state: MicroBatchState,
    ) -> None:
        self.module = module
        self.spec = spec
        self._halves = tuple(halves)
        self.units = [unit for half in halves for unit in half]
        self.before_first_slice: Callable[[], None] = lambda: None  # computes, behind its shift
        self._unit_spec = unit
        self._label = unit.label_of(spec)
        # Parameters' names in the model to those in the module.
        self._attributes = dict(zip(unit.cuts_of(spec), spec.cuts, strict=True))
        self._state = state
        self._of_slice = getattr(module, spec.of_slice)
        self._join = getattr(module, f"join_{spec.method}")
        self._whole = {name: getattr(module, name) for name in spec.cuts}
        for name in spec.cuts:
            if name not in module._parameters:  # a tied head's weight is a plain attribute
                delattr(module, name)
                module.register_parameter(name, None)
        self._parameters = module._parameters
        self._leaves: dict[tuple[Position, int], dict[str, nn.Parameter]] = {}  # by position, slot
        self._replicated = [module.get_parameter(name) for name in spec.replicated]
        self._trains_replicated = any(parameter.requires_grad for parameter in self._replicated)
        self._trains = any(unit.trainable for unit in self.units)
        self._shifts_back = False
        self._in_backward: Position | None = None
        self._input_needs_grad = False
        self._input_done = False
        setattr(module, spec.method, self)

    # Forward #

    def __call__(self, *args: Any) -> Tensor:
        first_of_two = self._state.phase is Phase.FORWARD
        self._shifts_back = (
            self._unit_spec.backward_needs_weight
            and self._backward_follows(args)
            and not (self._unit_spec.recomputed_from is not None and first_of_two)
        )
        with profile_range(f"rotate:{self._label}"):
            out: Tensor = self._join(self._slices(), *args)
        return out

    def _backward_follows(self, args: Sequence[Any]) -> bool:
        if not torch.is_grad_enabled():
            return False
        tensors = (arg for arg in args if isinstance(arg, Tensor))
        return self._trains or any(tensor.requires_grad for tensor in (*tensors, *self._replicated))

    def _slices(self) -> Iterator[Callable[..., Any]]:
        for number, half in enumerate(self._halves):
            for step in range(half[0].num_steps):
                yield partial(self._run, (number, step))

    def _run(self, position: Position, x: Tensor, *rest: Any) -> Any:
        try:
            return self._run_slice(position, x, *rest)
        finally:  # recomputation is stopped by an exception once it has all it needs
            self._parameters.update(self._whole)

    def _run_slice(self, position: Position, x: Tensor, *rest: Any) -> Any:
        number, step = position
        half = self._halves[number]
        for unit in half:
            if step == 0:
                unit.carry_out(unit.policy.begin_forward(shifts_back=self._shifts_back))
            unit.carry_out(unit.policy.before_forward(step))
            self._put(unit, position, unit.slot(step))
        if position == (0, 0):
            self.before_first_slice()
        self._input_needs_grad = torch.is_grad_enabled() and x.requires_grad
        if self._input_needs_grad:
            x = x.view_as(x)
            x.register_hook(self._input_grad_made)
        out = self._of_slice(x, *rest)
        for tensor in out if isinstance(out, tuple) else (out,):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._output_grad_made, position))
        for unit in half:
            unit.carry_out(unit.policy.after_forward(step))
            if step + 1 == unit.num_steps:
                unit.carry_out(unit.policy.end_forward())
        return out

    def _put(self, unit: RotatingUnit, position: Position, slot: Tensor) -> None:
        """Replaces the module's whole parameters by the boxes of a slice."""
        key = position, id(slot)  # the id is stable: slots live as long as their unit
        leaves = self._leaves.get(key)
        if leaves is None:
            leaves = self._leaves[key] = self._make_leaves(unit, position, slot)
        self._parameters.update(leaves)
        if self.spec.of_rows:
            self.module.first_row = unit.first_row(position[1])  # type: ignore[assignment]
        if self.spec.of_starts:
            starts: dict[str, int] = self.module.starts  # type: ignore[assignment]
            for name, first in unit.starts(position[1]).items():
                attribute = self._attributes[name]
                starts[attribute] = first[self.spec.cuts[attribute]]

    def _make_leaves(
        self, unit: RotatingUnit, position: Position, slot: Tensor
    ) -> dict[str, nn.Parameter]:
        leaves = {}
        for name, box in unit.boxes(position[1], slot).items():
            # `data`: the slot is overwritten while autograd holds the leaf, on purpose.
            leaf = nn.Parameter(box.data, requires_grad=unit.trainable)
            if unit.trainable:
                sink = _Sink(self, unit, position, name)
                leaf.grad_sink = sink  # type: ignore[attr-defined]
                leaf.register_post_accumulate_grad_hook(sink.take)
            leaves[self._attributes[name]] = leaf
        return leaves

    # Backward #

    def _output_grad_made(self, position: Position, _gradient: Tensor) -> None:
        """Runs right before the backward of a step, for each of its outputs."""
        if position == self._in_backward:
            return
        self.end_slice()
        self._in_backward, self._input_done = position, False
        if self._unit_spec.backward_needs_weight:
            number, step = position
            for unit in self._halves[number]:
                unit.carry_out(unit.policy.before_backward(step))

    def prepare_for_gradient(self, position: Position, unit: RotatingUnit, name: str) -> None:
        """Makes sure that the unit can take a gradient of the step that is in backward."""
        assert position == self._in_backward, f"{name}: {position} is not {self._in_backward}"
        if self._unit_spec.backward_needs_weight:
            unit.carry_out(unit.policy.before_backward(position[1]))

    def _input_grad_made(self, _gradient: Tensor | None) -> None:
        """Runs when a step's contribution to the input gradient is computed."""
        self._input_done = True
        self.end_slice_if_done()

    def end_slice_if_done(self) -> None:
        """Ends the step that is in backward once nothing of it is still to come."""
        assert self._in_backward is not None, f"{self._label} is not in backward"
        number, step = self._in_backward
        # If the input needs no gradient but a norm does, no hook fires when the norm's is computed.
        all_here = all(unit.has_all(step) for unit in self._halves[number])
        if all_here and (
            self._input_done if self._input_needs_grad else not self._trains_replicated
        ):
            self.end_slice()

    def end_slice(self) -> None:
        """Ends the step that is in backward, if any; call it too when backward has finished."""
        position, self._in_backward = self._in_backward, None
        if position is None:
            return
        number, step = position
        for unit in self._halves[number]:
            assert unit.has_all(step), f"{unit.name} misses gradients of step {step}"
            unit.after_backward(step)
            # A unit that borrows is not the last to add gradients to what it borrows.
            completes = unit.trainable and not self._unit_spec.borrows and self._state.last
            if step == 0 and completes:
                with profile_range(f"reduce:{unit.name}"):
                    unit.step_reduce()

    def close(self) -> None:
        """Drops the leaves: autograd keeps them alive, and their hooks reference this part."""
        self._leaves.clear()


@dataclass(frozen=True, slots=True)
class _Sink(GradSink):
    """Takes a box's gradient from the matmul that makes it, or else from autograd."""

    part: RotatingPart
    unit: RotatingUnit
    position: Position
    name: str

    def open(self) -> tuple[Tensor, bool]:
        """The buffer for the gradient, and whether to add to what it holds."""
        self.part.prepare_for_gradient(self.position, self.unit, self.name)
        return self.unit.grad_box(self.position[1], self.name)

    def close(self) -> None:
        """Says that the gradient is in the buffer."""
        self.unit.arrived()
        self.part.end_slice_if_done()
