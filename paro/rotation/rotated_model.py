"""Runs a model whose weights rotate: each part is computed slice by slice."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from model.matmul import GradSink
from paro.distributed.timers import Timers
from paro.rotation.partition import Parts
from paro.sharding.distributed_model import DistributedModel, MicroBatchState, Phase
from paro.sharding.sharded_unit import ShardedUnit
from paro.step.updating import UpdatingPolicy


class RotatedModel(DistributedModel):
    """A model of which each rank holds only slices and the replicated norms.

    A rank computes its own micro-batch with its current slice of a part and passes the slice on.
    The parts do this themselves when the model calls them.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Parts,
        timers: Timers,
        *,
        updated_ahead: int | None = None,
    ) -> None:
        # Norms are updated and all-gathered first: the next step needs all of them at its start.
        units = [*parts.replicated, *parts.rotating]
        numbers = {unit: number for number, unit in enumerate(units)}
        needed = [[numbers[unit] for unit in part.units] for part in parts.parts]
        needed[0] += range(len(parts.replicated))
        super().__init__(model, units, parts.state, timers, UpdatingPolicy(needed, updated_ahead))
        self._parts = parts.parts
        for index, part in enumerate(parts.parts):
            part.before_first_slice = partial(self._before_forward, index)
        self._replicated = parts.replicated
        parameters = dict(model.named_parameters())
        for unit in parts.replicated:
            for placed in unit.layout.boxes if unit.trainable else ():
                name = placed.box.name
                self._take_gradients(parameters[name], _Sink(self._state, unit, name))

    def close(self) -> None:
        """Closes comm streams and process groups; call it on every rank with no work in flight."""
        super().close()
        for part in self._parts:
            part.close()

    def _begin(self, phase: Phase, *, last: bool = False) -> None:
        super()._begin(phase, last=last)
        for unit in self._replicated:
            unit.use()

    def _before_forward(self, index: int) -> None:
        self._carry_out(self._updating.before_forward(index))

    def _end_backward(self) -> None:
        for part in self._parts:
            part.end_slice()


@dataclass(frozen=True, slots=True)
class _Sink(GradSink):
    """Takes a norm's gradient; with the last of its unit's, these are reduced."""

    state: MicroBatchState
    unit: ShardedUnit
    name: str

    def open(self) -> tuple[Tensor, bool]:
        return self.unit.grad_box(self.name)

    def close(self) -> None:
        if self.unit.arrived():
            self.unit.reduce()
            if self.state.last:
                self.unit.step_reduce()
