"""A model with gathered units: hooks tell a policy each event and carry out the actions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from paro.distributed.timers import Timers
from paro.sharding.distributed_model import DistributedModel, Phase
from paro.sharding.sharded_unit import ShardedUnit
from paro.step.gathering import GatheringPolicy


class ShardedModel(DistributedModel):
    """A model whose unit modules have unsharded parameters only while they run.

    The policy decides when units are gathered and released and when gradients are reduced.
    """

    policy: GatheringPolicy

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[ShardedUnit],
        policy: GatheringPolicy,
        timers: Timers,
    ) -> None:
        super().__init__(model, units, policy, timers)
        parameters = dict(model.named_parameters())
        planned = dict.fromkeys(spec.unit for spec in self.specs)
        for index, unit_spec in enumerate(planned):
            self._hook(index, model.get_submodule(unit_spec.name))
        borrowed = {name for unit_spec in planned for name in unit_spec.borrows}
        for unit in units:
            if unit.trainable:
                has_one_part = unit.spec.unit.name not in borrowed
                self._collect_gradients(unit, parameters, by_matmuls=has_one_part)

    def _hook(self, index: int, wrapped: nn.Module) -> None:
        before = wrapped.register_forward_pre_hook(lambda *_: self._before_forward(index))
        after = wrapped.register_forward_hook(lambda _m, _i, out: self._after_forward(index, out))
        self._removals += [before.remove, after.remove]

    def _before_forward(self, index: int) -> None:
        assert self.phase is not Phase.IDLE, f"unit {index} runs outside a step"
        if self.phase is Phase.BACKWARD:  # activation recomputation, maybe of several blocks
            self.carry_out(self.policy.before_recompute(index))
        else:
            self.carry_out(self.policy.before_forward(index))

    def _after_forward(self, index: int, output: Tensor) -> None:
        if self.phase is Phase.BACKWARD:
            return
        follows = output.requires_grad
        if follows:
            # The hook runs once the gradient of the unit's output is computed.
            output.register_hook(lambda _g: self.carry_out(self.policy.before_backward(index)))
        self.carry_out(self.policy.after_forward(index, backward_follows=follows))
