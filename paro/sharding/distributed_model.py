"""The frame of a step, for both kinds of distributed model, and the kind with gathered units."""

# A policy (paro/step/) decides when units gather, release and reduce. The engine tells the policy
# the events of a step and carries out the returned actions: `carry_out(policy.EVENT(...))`.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from model.matmul import GradSink
from paro.distributed.timers import Timers
from paro.sharding.sharded_unit import ShardedUnit
from paro.sharding.shards import UnitShards
from paro.step.actions import Action
from paro.step.gathering import GatheringPolicy
from paro.step.rotating import RotationPolicy


class Phase(Enum):
    """Activity of the training thread."""

    IDLE = 0
    EVALUATION = 1
    FORWARD = 2
    BACKWARD = 3


@dataclass(eq=False)
class DistributedModel:
    """A model that trains and evaluates this rank's batches; its units hold this rank's shards.

    Subclasses tell `policy` the events of their modules. After an exception the model is unusable.
    """

    model: nn.Module
    units: Sequence[UnitShards]
    policy: GatheringPolicy | RotationPolicy
    timers: Timers

    def __post_init__(self) -> None:
        self.specs = [unit.spec for unit in self.units]
        self.context = self.units[0].context
        self.trainable_units = [unit for unit in self.units if unit.trainable]
        self.phase = Phase.IDLE
        self.num_arrived: Counter[int] = Counter()  # unit -> gradients that are in its buffer
        self._numbers = {unit: number for number, unit in enumerate(self.units)}
        self._removals: list[Callable[[], None]] = []  # functions that remove hooks

    def begin_step(
        self, num_micro_batches: int, *, full_precision: bool = False, alone: bool = False
    ) -> None:
        """Start a step.

        With `full_precision` no communication is quantized in the step; with `alone` the groups of
        ranks train apart, and gradients are summed inside them only.
        """
        self._assert_idle()
        for unit in self.units:
            spec = unit.spec.exact if full_precision else unit.spec
            unit.step_spec = spec.alone if alone else spec
        self.carry_out(self.policy.begin_step(num_micro_batches))

    def forward_backward(self, *inputs: Tensor, last: bool, **documents: Any) -> Tensor:
        """Accumulate the gradients of one micro-batch and return its weighted loss.

        `inputs` are the tokens, labels and weights of the model, `documents` keyword arguments.
        """
        self._begin(Phase.FORWARD)
        self.carry_out(self.policy.begin_micro_batch(last=last))
        with self.timers.measure("forward-compute", level=2):
            loss: Tensor = self.model(*inputs, **documents)
        self.phase = Phase.BACKWARD
        with self.timers.measure("backward-compute", level=2):
            loss.backward()
        self.carry_out(self.policy.end_backward())
        self.phase = Phase.IDLE
        return loss.detach()

    def finish_grad_sync(self) -> None:
        """Wait until each unit's optimizer range holds the gradients summed over all ranks."""
        self._assert_idle()
        self.carry_out(self.policy.end_step())

    def forget_grad_errors(self) -> None:
        """Reset the error feedback of gradients."""
        for unit in self.trainable_units:
            if unit.grad_errors is not None:
                unit.grad_errors.zero_()

    @torch.no_grad()
    def evaluate(self, *inputs: Tensor, **documents: Any) -> Tensor:
        """Return the weighted loss of a batch, computed without gradients."""
        self._begin(Phase.EVALUATION)
        self.carry_out(self.policy.begin_evaluation())
        loss: Tensor = self.model(*inputs, **documents)
        self.phase = Phase.IDLE
        return loss

    def updated(self, unit: UnitShards) -> None:
        """Tell the policy that a unit's optimizer range has new parameters, to be all-gathered."""
        self.carry_out(self.policy.param_all_gathers.updated(self._numbers[unit]))

    def wait_for_updated_params(self) -> None:
        """Wait until `param_shard` of every unit holds the last update."""
        self.carry_out(self.policy.param_all_gathers.flush())
        for unit in self.units:
            unit.wait_for_updated_params()

    def close(self) -> None:
        """Close comm streams and process groups; call it on every rank with no work in flight.

        Also removes the model's hooks: autograd keeps them alive, and they reference this object.
        """
        self.context.collectives.close()
        while self._removals:
            self._removals.pop()()

    def carry_out(self, actions: Iterable[Action]) -> None:
        """Carry out the actions with which the policy answers an event, by methods of units."""
        for kind, number, *slots in actions:
            getattr(self.units[number], kind.name.lower())(*slots)

    def _begin(self, phase: Phase) -> None:
        self._assert_idle()
        self.phase = phase

    def _assert_idle(self) -> None:
        assert self.phase is Phase.IDLE, f"the model is in {self.phase}"

    def _collect_gradients(
        self, unit: ShardedUnit, parameters: Mapping[str, nn.Parameter], *, by_matmuls: bool
    ) -> None:
        """Direct a unit's gradients into its buffers; with `by_matmuls` matmuls write them there.

        `by_matmuls` is False if another unit reads the parameters too: gradients have two parts.
        """
        number, chunks = self._numbers[unit], unit.layout.chunks
        for name in (placed.chunk.name for placed in chunks):
            view, parameter = partial(unit.grad_view, name), parameters[name]
            sink = UnitGradSink(model=self, number=number, total=len(chunks), view=view)
            hook = parameter.register_post_accumulate_grad_hook(sink.take)
            self._removals.append(hook.remove)
            if by_matmuls:
                parameter.grad_sink = sink  # type: ignore[attr-defined]
                self._removals.append(partial(delattr, parameter, "grad_sink"))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitGradSink(GradSink):
    """The destination of a parameter's gradient, which a matmul or else autograd delivers.

    A matmul writes the gradient into the unit's buffer, without a copy or a separate addition. The
    policy is told of the first and the last of the gradients that arrive together.
    """

    model: DistributedModel
    number: int  # index of the unit
    total: int  # number of gradients of the unit that arrive together
    view: Callable[[], tuple[Tensor, bool]]  # returns (view of the unit's buffer, whether to add)

    def open(self) -> tuple[Tensor, bool]:
        """Return the buffer for the gradient, and whether to add to the values in the buffer."""
        model = self.model
        if not model.num_arrived[self.number]:
            model.carry_out(model.policy.first_gradient(self.number))
        return self.view()

    def close(self) -> None:
        """Record that the gradient is in the buffer."""
        model, number = self.model, self.number
        model.num_arrived[number] = (model.num_arrived[number] + 1) % self.total
        if not model.num_arrived[number]:
            model.carry_out(model.policy.last_gradient(number))


@dataclass(eq=False)
class ShardedModel(DistributedModel):
    """A model whose unit modules have unsharded parameters only while they run.

    The policy decides when units are gathered and released and when gradients are reduced.
    """

    units: Sequence[ShardedUnit]
    policy: GatheringPolicy

    def __post_init__(self) -> None:
        super().__post_init__()
        parameters = dict(self.model.named_parameters())
        planned = dict.fromkeys(spec.unit for spec in self.specs)
        for index, unit_spec in enumerate(planned):
            unit_module = self.model.get_submodule(unit_spec.name)
            before = unit_module.register_forward_pre_hook(partial(self._before_forward, index))
            after = unit_module.register_forward_hook(partial(self._after_forward, index))
            self._removals += [before.remove, after.remove]
        borrowed = {name for unit_spec in planned for name in unit_spec.borrows}
        for unit in self.units:
            if unit.trainable:
                has_one_part = unit.spec.unit.name not in borrowed
                self._collect_gradients(unit, parameters, by_matmuls=has_one_part)

    def _before_forward(self, index: int, _module: nn.Module, _inputs: Any) -> None:
        assert self.phase is not Phase.IDLE, f"unit {index} runs outside a step"
        if self.phase is Phase.BACKWARD:  # activation recomputation, maybe of several blocks
            self.carry_out(self.policy.before_recompute(index))
        else:
            self.carry_out(self.policy.before_forward(index))

    def _after_forward(self, index: int, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        if self.phase is Phase.BACKWARD:
            return
        follows = output.requires_grad
        if follows:
            # The hook runs once the gradient of the unit's output is computed.
            output.register_hook(lambda _g: self.carry_out(self.policy.before_backward(index)))
        self.carry_out(self.policy.after_forward(index, backward_follows=follows))
