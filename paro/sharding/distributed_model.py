"""The frame of a step, for both kinds of distributed model: sharded (gathered) and rotated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from model.matmul import GradSink
from paro.distributed.timers import Timers
from paro.sharding.shards import UnitShards
from paro.step.actions import Action, Move, Verb
from paro.step.updating import UpdatingPolicy


class Phase(Enum):
    """What the training thread is doing to the model."""

    IDLE = 0
    EVALUATION = 1
    FORWARD = 2
    BACKWARD = 3


@dataclass(slots=True)
class MicroBatchState:
    """The phase of the current micro-batch; the parts of a rotated model share it."""

    phase: Phase = Phase.IDLE
    last: bool = False  # whether it is the last one of its step


class DistributedModel:
    """A model that trains and evaluates this rank's batches; its units hold this rank's shards.

    Subclasses make parameters readable where the model needs them, and pass gradients to the units.
    `UpdatingPolicy` decides when updated parameters are all-gathered. `record`, if it is a list,
    gets every action that is carried out. After an exception the model is unusable.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[UnitShards],
        state: MicroBatchState,
        timers: Timers,
        updating: UpdatingPolicy,
    ) -> None:
        self.model = model
        self.units = units
        self.specs = [unit.spec for unit in units]
        self.context = units[0].context
        self.trainable_units = [unit for unit in units if unit.trainable]
        self._state = state
        self._timers = timers
        self._updating = updating
        self._numbers = {unit: number for number, unit in enumerate(units)}
        self._carried_out: dict[Verb, Callable[[Any], None]] = {
            Verb.GATHER_UPDATED: lambda unit: unit.gather_updated()
        }
        self.record: list[Move] | None = None
        self._removals: list[Callable[[], None]] = []  # of hooks

    def begin_step(self, num_micro_batches: int, *, full_precision: bool = False) -> None:
        """Starts a step; with `full_precision` it sends no codes."""
        self._assert_idle()
        for unit in self.units:
            unit.full_precision = full_precision

    def forward_backward(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor,
        weights_BS: Tensor,
        *,
        last: bool,
        **documents: Any,
    ) -> Tensor:
        """Accumulates the gradients of one micro-batch and returns its weighted loss.

        `documents` are keyword arguments of the model.
        """
        self._begin(Phase.FORWARD, last=last)
        with self._timers.measure("forward-compute", level=2):
            loss = self.model(tokens_BS, labels_BS, weights_BS, **documents)
        self._state.phase = Phase.BACKWARD
        with self._timers.measure("backward-compute", level=2):
            loss.backward()
        self._end_backward()
        self._state.phase = Phase.IDLE
        return loss.detach()

    def finish_gradients(self) -> None:
        """Waits until each unit's optimizer range holds the gradients summed over all ranks."""
        self._assert_idle()
        for unit in self.trainable_units:
            unit.wait_reduced()

    def forget_grad_errors(self) -> None:
        """Error feedback of gradients begins anew."""
        for unit in self.trainable_units:
            if unit.grad_errors is not None:
                unit.grad_errors.zero_()

    @torch.no_grad()
    def evaluate(
        self, tokens_BS: Tensor, labels_BS: Tensor, weights_BS: Tensor, **documents: Any
    ) -> Tensor:
        """The weighted loss of a batch, computed without gradients."""
        self._begin(Phase.EVALUATION)
        loss = self.model(tokens_BS, labels_BS, weights_BS, **documents)
        self._state.phase = Phase.IDLE
        return loss

    def updated(self, unit: UnitShards) -> None:
        """Says that a unit's optimizer range has new parameters, to be all-gathered."""
        self._carry_out(self._updating.updated(self._numbers[unit]))

    def wait_for_updated_params(self) -> None:
        """Waits until `param_shard` of every unit holds the last update."""
        self._carry_out(self._updating.flush())
        for unit in self.units:
            unit.wait_for_updated_params()

    def close(self) -> None:
        """Closes comm streams and process groups; call it on every rank with no work in flight.

        Also removes the model's hooks: autograd keeps them alive, and they reference this object.
        """
        self.context.collectives.close()
        while self._removals:
            self._removals.pop()()

    def _begin(self, phase: Phase, *, last: bool = False) -> None:
        """Starts a forward, maybe that of the `last` micro-batch; extended by subclasses."""
        self._assert_idle()
        self._state.phase, self._state.last = phase, last

    def _end_backward(self) -> None:
        """Runs after the backward of a micro-batch; defined by subclasses."""
        raise NotImplementedError

    def _carry_out(self, actions: Iterable[Action]) -> None:
        for verb, number in actions:
            self._carried_out[verb](self.units[number])
            if self.record is not None:
                self.record.append((verb, number))

    def _assert_idle(self) -> None:
        assert self._state.phase is Phase.IDLE, f"the model is in {self._state.phase}"

    def _take_gradients(self, parameter: nn.Parameter, sink: GradSink) -> None:
        """Passes the parameter's gradient of every backward to the sink instead of keeping it."""
        self._removals.append(parameter.register_post_accumulate_grad_hook(sink.take).remove)
