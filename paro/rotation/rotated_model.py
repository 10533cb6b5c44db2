"""Runs a model whose weights rotate: each part is computed slice by slice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paro.distributed.timers import Timers
from paro.rotation.part import MicroBatchState
from paro.rotation.partition import Parts
from paro.rotation.ring import Ring
from paro.sharding.distributed_model import Phase
from paro.sharding.sharded_unit import ShardedUnit
from paro.sharding.shards import UnitShards


class RotatedModel:
    """A model of which each rank holds only slices and the replicated norms.

    A rank computes its own micro-batch with its current slice of a part and passes the slice on.
    The parts do this themselves when the model calls them. After an exception the model is
    unusable.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Parts,
        ring: Ring,
        state: MicroBatchState,
        *,
        timers: Timers | None = None,
    ) -> None:
        self.model = model
        self.units: list[UnitShards] = [*parts.rotating, *parts.beside]
        self.context = self.units[0].context  # norms have a separate, replicated context
        # Norms are updated and all-gathered first: the next step needs all of them at its start.
        first = (*parts.beside, *parts.rotating)
        self.trainable_units = [unit for unit in first if unit.trainable]
        self._parts = parts.parts
        self._beside = parts.beside
        self._ring = ring
        self._timers = timers or Timers()
        self._state = state
        self._handles: list[RemovableHandle] = []
        parameters = dict(model.named_parameters())
        for unit in parts.beside:
            for span in unit.layout.spans if unit.trainable else ():
                self._hook_gradient(unit, span.box.name, parameters[span.box.name])

    def begin_step(self, num_micro_batches: int) -> None:
        """Starts a step of `num_micro_batches` micro-batches."""
        self._assert_idle()

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
        self._begin(Phase.FORWARD)
        self._state.last = last
        with self._timers.measure("forward-compute", level=2):
            loss = self.model(tokens_BS, labels_BS, weights_BS, **documents)
        self._state.phase = Phase.BACKWARD
        with self._timers.measure("backward-compute", level=2):
            loss.backward()
        for part in self._parts:
            part.finish_backward()
        self._state.phase = Phase.IDLE
        return loss.detach()

    def finish_gradients(self) -> None:
        """Waits until each unit's optimizer range holds the gradients summed over all ranks."""
        self._assert_idle()
        for unit in self.trainable_units:
            unit.wait_reduced()

    @torch.no_grad()
    def evaluate(
        self, tokens_BS: Tensor, labels_BS: Tensor, weights_BS: Tensor, **documents: Any
    ) -> Tensor:
        """The weighted loss of a batch, computed without gradients."""
        self._begin(Phase.EVALUATION)
        loss: Tensor = self.model(tokens_BS, labels_BS, weights_BS, **documents)
        self._state.phase = Phase.IDLE
        return loss

    def wait_for_updated_params(self) -> None:
        """Waits until `param_shard` of every unit holds the last update."""
        for unit in self.units:
            unit.wait_for_updated_params()

    def close(self) -> None:
        """Closes comm streams and process groups; call it on every rank with no work in flight.

        Also removes the parameter hooks: autograd keeps them alive, and they reference this object.
        """
        self.context.collectives.close()
        self._ring.close()
        for part in self._parts:
            part.close()
        while self._handles:
            self._handles.pop().remove()

    def _begin(self, phase: Phase) -> None:
        self._assert_idle()
        self._state.phase = phase
        for unit in self._beside:
            unit.use()

    def _assert_idle(self) -> None:
        assert self._state.phase is Phase.IDLE, f"the model is in {self._state.phase}"

    def _hook_gradient(self, unit: ShardedUnit, name: str, parameter: nn.Parameter) -> None:
        def arrived(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None, f"{name} got no gradient"
            if unit.receive(name, gradient):
                unit.reduce(last=self._state.last)

        self._handles.append(parameter.register_post_accumulate_grad_hook(arrived))
