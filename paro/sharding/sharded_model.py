"""Runs a sharded model: hooks tell the policy of a step what happens, and carry out its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from model.matmul import GradSink
from paro.distributed.profile_range import profile_range
from paro.distributed.timers import Timers
from paro.sharding.distributed_model import DistributedModel, MicroBatchState, Phase
from paro.sharding.sharded_unit import ShardedUnit
from paro.step.actions import Buckets, StepShape, Verb
from paro.step.gathering import GatheringPolicy
from paro.step.updating import UpdatingPolicy


class ShardedModel(DistributedModel):
    """A model whose unit modules have whole parameters only while they run.

    `GatheringPolicy` decides when units are gathered and released and gradients reduced.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[ShardedUnit],
        shape: StepShape,
        timers: Timers,
        *,
        updated_ahead: int | None = None,
    ) -> None:
        needed = [unit.needed for unit in shape.units]
        updating = UpdatingPolicy(needed, updated_ahead, Buckets(shape.units))
        super().__init__(model, units, MicroBatchState(), timers, updating)
        self._policy = GatheringPolicy(shape, updating)
        self._carried_out |= {
            Verb.GATHER: _gather,
            Verb.WAIT: ShardedUnit.use,
            Verb.KEEP: ShardedUnit.keep_casts,
            Verb.DROP: ShardedUnit.drop_casts,
            Verb.RELEASE: ShardedUnit.release,
            Verb.ALLOCATE: ShardedUnit.alloc_whole_grad,
            Verb.FREE: ShardedUnit.free_whole_grad,
            Verb.REDUCE: _reduce,
            Verb.STEP_REDUCE: ShardedUnit.step_reduce,
            Verb.WAIT_REDUCED: ShardedUnit.wait_reduced,
        }
        parameters = dict(model.named_parameters())
        planned = dict.fromkeys(spec.unit for spec in self.specs)
        for index, one in enumerate(planned):
            self._hook(index, model.get_submodule(one.name))
        borrowed = {name for one in planned for name in one.borrows}
        for unit in units:
            if unit.trainable:
                has_one_part = unit.spec.unit.name not in borrowed
                self._make_sinks(unit, parameters, by_matmuls=has_one_part)

    # Called by the training loop #

    def begin_step(self, num_micro_batches: int, *, full_precision: bool = False) -> None:
        """Starts a step; with `full_precision` it sends no codes."""
        super().begin_step(num_micro_batches, full_precision=full_precision)
        self._carry_out(self._policy.begin_step(num_micro_batches))

    def finish_gradients(self) -> None:
        """Waits until each unit's optimizer range holds the gradients summed over all ranks."""
        self._assert_idle()
        self._carry_out(self._policy.end_step())

    def _begin(self, phase: Phase, *, last: bool = False) -> None:
        super()._begin(phase, last=last)
        if phase is Phase.EVALUATION:
            self._policy.begin_evaluation()
        else:
            self._policy.begin_micro_batch(last=last)

    def _end_backward(self) -> None:
        self._carry_out(self._policy.end_backward())

    # Called by autograd and module hooks #

    def _hook(self, index: int, wrapped: nn.Module) -> None:
        before = wrapped.register_forward_pre_hook(lambda *_: self._before_forward(index))
        after = wrapped.register_forward_hook(lambda _m, _i, out: self._after_forward(index, out))
        self._removals += [before.remove, after.remove]

    def _make_sinks(
        self, unit: ShardedUnit, parameters: Mapping[str, nn.Parameter], *, by_matmuls: bool
    ) -> None:
        """Has a unit's gradients put into its buffers; `by_matmuls`, which write those of weights.

        Not the gradients of parameters that two units read: they have two parts.
        """
        for placed in unit.layout.boxes:
            name = placed.box.name
            parameter, sink = parameters[name], _Sink(self, self._numbers[unit], unit, name)
            self._take_gradients(parameter, sink)
            if by_matmuls:
                parameter.grad_sink = sink  # type: ignore[attr-defined]
                self._removals.append(partial(delattr, parameter, "grad_sink"))

    def _before_forward(self, index: int) -> None:
        phase = self._state.phase
        assert phase is not Phase.IDLE, f"unit {index} runs outside a step"
        if phase is Phase.BACKWARD:  # activation recomputation, maybe of several blocks
            self._carry_out(self._policy.before_recompute(index))
        else:
            self._carry_out(self._policy.before_forward(index))

    def _after_forward(self, index: int, output: Tensor) -> None:
        if self._state.phase is Phase.BACKWARD:
            return
        follows = output.requires_grad
        if follows:
            # Runs when the gradient of a unit's output is made.
            output.register_hook(lambda _g: self._carry_out(self._policy.before_backward(index)))
        self._carry_out(self._policy.after_forward(index, backward_follows=follows))

    def first_gradient(self, number: int) -> None:
        """Prepares a buffer for the first gradient of this backward."""
        self._carry_out(self._policy.first_gradient(number))

    def last_gradient(self, number: int) -> None:
        """Reduces the gradients of a buffer, which have all arrived."""
        self._carry_out(self._policy.last_gradient(number))


def _gather(unit: ShardedUnit) -> None:
    with profile_range(f"gather:{unit.name}"):
        unit.gather()


def _reduce(unit: ShardedUnit) -> None:
    with profile_range(f"reduce:{unit.name}"):
        unit.reduce()


@dataclass(frozen=True, slots=True)
class _Sink(GradSink):
    """Takes a parameter's gradient from the matmul that makes it, or else from autograd.

    A matmul writes it into the unit's buffer: it is neither copied nor added.
    """

    model: ShardedModel
    number: int
    unit: ShardedUnit
    name: str

    def open(self) -> tuple[Tensor, bool]:
        """The buffer for the gradient, and whether to add to what it holds."""
        if self.unit.num_arrived == 0:
            self.model.first_gradient(self.number)
        return self.unit.grad_box(self.name)

    def close(self) -> None:
        """Says that the gradient is in the buffer."""
        if self.unit.arrived():
            self.model.last_gradient(self.number)
