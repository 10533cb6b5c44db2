"""A part of the model that is computed slice by slice while its weights rotate."""

# [Note: backward of a pass]
# Every step of a forward runs between two identities of autograd, which tell in backward when the
# gradients of its output are there and when those of its input have been made. Autograd runs what
# was computed last first, and passes leaves their gradients at once: so the steps come back in the
# opposite order, each with all its gradients before the next begins. A step also ends where the one
# before it begins, or backward as a whole, since not every step has an input that needs gradients.
#
# Where a forward is computed again (non-reentrant recomputation) backward runs the identities of
# the first one, whose leaves get the gradients; the second one fills in what that did not keep.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paro.rotation.unit import RotatingUnit
from paro.sharding.layout import Piece


class Phase(Enum):
    """What the training thread is doing to the model."""

    IDLE = 0
    EVALUATION = 1
    FORWARD = 2
    BACKWARD = 3


@dataclass(slots=True, kw_only=True)
class Progress:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How a part's weights travel, beside what its spec says."""

    returns: bool  # backward reads the weights
    recomputed: bool  # forward runs again in backward
    completes: bool  # no other part brings gradients to its units after it


class RotatingPart:
    """Takes the place of a method of a module; `units` hold the method's matrices."""

    def __init__(
        self,
        module: nn.Module,
        spec: PartSpec,
        units: Sequence[RotatingUnit],
        course: Course,
        progress: Progress,
    ) -> None:
        self.module = module
        self.spec = spec
        self.units = tuple(units)
        self._course = course
        self._progress = progress
        self._of_slice = getattr(module, spec.of_slice)
        self._whole = {name: getattr(module, name) for name in spec.cuts}
        self._beside = [module.get_parameter(name) for name in spec.beside]
        self._trains_beside = any(parameter.requires_grad for parameter in self._beside)
        self._num_steps = units[0].num_steps
        self._step_of_backward: int | None = None
        self._input_needs_grad = False
        self._input_done = False
        setattr(module, spec.method, self)

    # Forward #

    def __call__(self, *args: Any) -> Tensor:
        course, first_of_two = self._course, self._progress.phase is Phase.FORWARD
        moves_home = (
            course.returns
            and self._backward_follows(args)
            and not (course.recomputed and first_of_two)
        )
        for unit in self.units:
            unit.begin(moves_home=moves_home)
        with torch.profiler.record_function(f"paro/rotate:{self.units[0].name}"):
            out = self.spec.join(self.module, self._slices(), *args)
        for unit in self.units:
            unit.end()
        return out

    def _backward_follows(self, args: Sequence[Any]) -> bool:
        if not torch.is_grad_enabled():
            return False
        tensors = (arg for arg in args if isinstance(arg, Tensor))
        trained = any(unit.trainable for unit in self.units)
        return trained or any(tensor.requires_grad for tensor in (*tensors, *self._beside))

    def _slices(self) -> Iterator[Callable[..., Any]]:
        for step in range(self._num_steps):
            yield partial(self._run, step)

    def _run(self, step: int, x: Tensor, *rest: Any) -> Any:
        try:
            return self._run_slice(step, x, *rest)
        finally:  # computing again stops where it has all it needs
            for name, whole in self._whole.items():
                setattr(self.module, name, whole)

    def _run_slice(self, step: int, x: Tensor, *rest: Any) -> Any:
        for unit in self.units:
            for name, (piece, leaf) in unit.arrive(step).items():
                self._put(unit, step, name, piece, leaf)
        if torch.is_grad_enabled() and x.requires_grad:
            self._input_needs_grad = True
            x = _StepBegins.apply(x, self, step)
        else:
            self._input_needs_grad = False
        out = self._of_slice(x, *rest)
        outs = out if isinstance(out, tuple) else (out,)
        if any(tensor.requires_grad for tensor in outs):
            outs = _StepEnds.apply(self, step, *outs)
        for unit in self.units:
            unit.depart(step)
        return outs if isinstance(out, tuple) else outs[0]

    def _put(
        self, unit: RotatingUnit, step: int, name: str, piece: Piece, leaf: nn.Parameter
    ) -> None:
        """Puts a box of a slice in the place of the whole parameter."""
        setattr(self.module, name.rpartition(".")[2], leaf)
        if self.spec.of_rows:
            self.module.first_row = piece.box.start[0]  # type: ignore[assignment]
        if leaf.requires_grad and torch.is_grad_enabled():
            leaf.register_post_accumulate_grad_hook(partial(self._received, unit, step, name))

    # Backward #

    def output_grad_made(self, step: int) -> None:
        """Runs right before the backward of a step."""
        self._end_step()
        self._step_of_backward, self._input_done = step, False
        if self._course.returns:
            for unit in self.units:
                unit.return_to(step)

    def _received(self, unit: RotatingUnit, step: int, name: str, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None, f"{name} got no gradient"
        assert step == self._step_of_backward, f"{name}: {step} is not {self._step_of_backward}"
        if self._course.returns:
            unit.return_to(step)
        unit.receive(step, name, gradient)
        self._end_step_if_through()

    def input_grad_made(self) -> None:
        """Runs when the gradient of a step's input has been made."""
        self._input_done = True
        self._end_step_if_through()

    def _end_step_if_through(self) -> None:
        step = self._step_of_backward
        assert step is not None, f"{self.units[0].name} is not in backward"
        # Where the input needs no gradient, but a norm does, nothing tells when that has been made.
        all_here = all(unit.has_all(step) for unit in self.units)
        if all_here and (self._input_done if self._input_needs_grad else not self._trains_beside):
            self._end_step()

    def _end_step(self) -> None:
        step, self._step_of_backward = self._step_of_backward, None
        if step is None:
            return
        for unit in self.units:
            assert unit.has_all(step), f"{unit.name} misses gradients of step {step}"
            unit.leave(step)
            if step == 0 and unit.trainable and self._course.completes and self._progress.last:
                with torch.profiler.record_function(f"paro/reduce:{unit.name}"):
                    unit.finish()

    def finish_backward(self) -> None:
        """Backward is through, whatever is left."""
        self._end_step()


class _StepBegins(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, part: RotatingPart, step: int) -> Tensor:
        ctx.part = part
        ctx.set_materialize_grads(False)  # slices that share a norm leave it to the last of them
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        ctx.part.input_grad_made()
        return grads[0], None, None


class _StepEnds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: RotatingPart, step: int, *outs: Tensor) -> tuple[Tensor, ...]:
        ctx.part, ctx.step = part, step
        return tuple(out.view_as(out) for out in outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.part.output_grad_made(ctx.step)
        return None, None, *grads
