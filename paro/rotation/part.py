"""A part of the model that is computed slice by slice while its weights rotate."""

# [Note: backward of a pass]
# Hooks on the output of a step and on its own view of the input tell in backward when the gradients
# of the one are there and those of the other have been made (or left to a later step, where slices
# share a norm). Autograd runs what was computed last first, and passes leaves their gradients at
# once: so the steps come back in the opposite order, each with all its gradients before the next
# begins. A step also ends where the one before it begins, or backward as a whole, since not every
# step has an input that needs gradients.
#
# Where a forward is computed again (non-reentrant recomputation) backward runs the hooks of the
# first one, whose leaves get the gradients; the second one fills in what that did not keep.
#
# The leaves of a step are made once for every slot that its slice may lie in: a slot's storage
# comes and goes, its views stay.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paro.rotation.rotating_unit import RotatingUnit
from paro.sharding.distributed_model import Phase


@dataclass(slots=True, kw_only=True)
class MicroBatchState:
    """Where the micro-batch that runs has come to; shared by all parts of a model."""

    phase: Phase = Phase.IDLE
    last: bool = False  # of its step


class PartSpec(Protocol):
    """What a model says of a part that may be computed slice by slice."""

    @property
    def method(self) -> str: ...

    @property
    def of_slice(self) -> str: ...

    @property
    def cuts(self) -> Mapping[str, int]: ...

    @property
    def beside(self) -> tuple[str, ...]: ...

    @property
    def join(self) -> Callable[..., Tensor]: ...

    @property
    def of_rows(self) -> bool: ...

    @property
    def shares(self) -> int | None: ...


# The units that hold a part's matrices, trainable and frozen ones, or half of every slice of them.
Half = tuple[RotatingUnit, ...]
Position = tuple[int, int]  # the number of a lap, and a step of it


@dataclass(frozen=True, slots=True, kw_only=True)
class RotationPlan:
    """How a part's weights travel, beside what its spec says."""

    returns: bool  # backward reads the weights
    recomputed: bool  # forward runs again in backward
    completes: bool  # no other part brings gradients to its units after it


class RotatingPart:
    """Takes the place of a method of a module; `halves` hold the method's matrices.

    Slices, or their halves, travel lap by lap; in backward the last lap comes first.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: PartSpec,
        halves: Sequence[Half],
        plan: RotationPlan,
        state: MicroBatchState,
    ) -> None:
        self.module = module
        self.spec = spec
        self._halves = tuple(halves)
        self._plan = plan
        self._state = state
        self._of_slice = getattr(module, spec.of_slice)
        self._whole = {name: getattr(module, name) for name in spec.cuts}
        for name in spec.cuts:
            if name not in module._parameters:  # a tied head's is an attribute
                delattr(module, name)
                module.register_parameter(name, None)
        self._parameters = module._parameters
        self._leaves: dict[tuple[Position, int], dict[str, nn.Parameter]] = {}  # by place and slot
        self._beside = [module.get_parameter(name) for name in spec.beside]
        self._trains_beside = any(parameter.requires_grad for parameter in self._beside)
        self._trains = any(unit.trainable for half in halves for unit in half)
        self._name = halves[0][0].name.partition(" ")[0]
        self._moves_home = False
        self._in_backward: Position | None = None
        self._input_needs_grad = False
        self._input_done = False
        setattr(module, spec.method, self)

    # Forward #

    def __call__(self, *args: Any) -> Tensor:
        plan, first_of_two = self._plan, self._state.phase is Phase.FORWARD
        self._moves_home = (
            plan.returns and self._backward_follows(args) and not (plan.recomputed and first_of_two)
        )
        with torch.profiler.record_function(f"paro/rotate:{self._name}"):
            out: Tensor = self.spec.join(self.module, self._slices(), *args)
        return out

    def _backward_follows(self, args: Sequence[Any]) -> bool:
        if not torch.is_grad_enabled():
            return False
        tensors = (arg for arg in args if isinstance(arg, Tensor))
        return self._trains or any(tensor.requires_grad for tensor in (*tensors, *self._beside))

    def _slices(self) -> Iterator[Callable[..., Any]]:
        for number, half in enumerate(self._halves):
            for step in range(half[0].num_steps):
                yield partial(self._run, (number, step))

    def _run(self, position: Position, x: Tensor, *rest: Any) -> Any:
        try:
            return self._run_slice(position, x, *rest)
        finally:  # computing again stops where it has all it needs
            self._parameters.update(self._whole)

    def _run_slice(self, position: Position, x: Tensor, *rest: Any) -> Any:
        number, step = position
        half = self._halves[number]
        for unit in half:
            if step == 0:
                unit.begin(moves_home=self._moves_home)
            self._put(unit, position, unit.arrive(step))
        self._input_needs_grad = torch.is_grad_enabled() and x.requires_grad
        if self._input_needs_grad:
            x = x.view_as(x)
            x.register_hook(self._input_grad_made)
        out = self._of_slice(x, *rest)
        for tensor in out if isinstance(out, tuple) else (out,):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._output_grad_made, position))
        for unit in half:
            unit.depart(step)
            if step + 1 == unit.num_steps:
                unit.end()
        return out

    def _put(self, unit: RotatingUnit, position: Position, slot: Tensor) -> None:
        """Puts the boxes of a slice in the place of the whole parameters."""
        key = position, id(slot)  # slots live as long as their unit
        leaves = self._leaves.get(key)
        if leaves is None:
            leaves = self._leaves[key] = self._make_leaves(unit, position, slot)
        self._parameters.update(leaves)
        if self.spec.of_rows:
            self.module.first_row = unit.first_row(position[1])  # type: ignore[assignment]

    def _make_leaves(
        self, unit: RotatingUnit, position: Position, slot: Tensor
    ) -> dict[str, nn.Parameter]:
        leaves = {}
        for name, box in unit.boxes(position[1], slot).items():
            # `data`: the slot is written while autograd keeps the leaf, on purpose.
            leaf = nn.Parameter(box.data, requires_grad=unit.trainable)
            if unit.trainable:
                leaf.register_post_accumulate_grad_hook(
                    partial(self._received, unit, position, name)
                )
            leaves[name.rpartition(".")[2]] = leaf
        return leaves

    # Backward #

    def _output_grad_made(self, position: Position, _gradient: Tensor) -> None:
        """Runs right before the backward of a step, for each of its outputs."""
        if position == self._in_backward:
            return
        self._end_step()
        self._in_backward, self._input_done = position, False
        if self._plan.returns:
            number, step = position
            for unit in self._halves[number]:
                unit.return_to(step)

    def _received(self, unit: RotatingUnit, position: Position, name: str, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None, f"{name} got no gradient"
        assert position == self._in_backward, f"{name}: {position} is not {self._in_backward}"
        if self._plan.returns:
            unit.return_to(position[1])
        unit.receive(position[1], name, gradient)
        self._end_step_if_through()

    def _input_grad_made(self, _gradient: Tensor | None) -> None:
        """Runs when what a step adds to the gradient of its input has been made."""
        self._input_done = True
        self._end_step_if_through()

    def _end_step_if_through(self) -> None:
        assert self._in_backward is not None, f"{self._name} is not in backward"
        number, step = self._in_backward
        # Where the input needs no gradient, but a norm does, nothing tells when that has been made.
        all_here = all(unit.has_all(step) for unit in self._halves[number])
        if all_here and (self._input_done if self._input_needs_grad else not self._trains_beside):
            self._end_step()

    def _end_step(self) -> None:
        position, self._in_backward = self._in_backward, None
        if position is None:
            return
        number, step = position
        for unit in self._halves[number]:
            assert unit.has_all(step), f"{unit.name} misses gradients of step {step}"
            unit.leave(step)
            if step == 0 and unit.trainable and self._plan.completes and self._state.last:
                with torch.profiler.record_function(f"paro/reduce:{unit.name}"):
                    unit.step_reduce()

    def finish_backward(self) -> None:
        """Backward is through, whatever is left."""
        self._end_step()

    def close(self) -> None:
        """Drops what autograd would keep alive: leaves whose hooks know this part."""
        self._leaves.clear()
