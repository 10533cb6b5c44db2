"""Faults of one rank that comparisons of trainings must see, each far above what rounding does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist
from torch import Tensor

from paro.optim.adamw import AdamWUpdate
from paro.sharding.sharded_unit import ShardedUnit
from paro.step.actions import Action
from paro.training.step import Training
from tests.helpers.ranks import run_ranks
from tests.helpers.training import FP32, Trained, margin_between, train
from tests.paro.test_parity import LORA, MODERN, MUON, flags_for, reference_for

BAD_RANK = 1


def _spoil_gradients(training: Training, unit: int, spoil: Callable[[ShardedUnit], None]) -> None:
    """Calls `spoil` when a unit's gradients of the second micro-batch have arrived."""
    model, spoiled = training.model, training.model.trainable_units[unit]
    policy, spoiled_number = model.policy, model.units.index(spoiled)
    last_gradient, backwards = policy.last_gradient, iter(range(10**9))

    def last_gradient_and_spoiled(number: int) -> list[Action]:
        if number == spoiled_number and next(backwards) == 1:
            spoil(spoiled)
        return last_gradient(number)

    policy.last_gradient = last_gradient_and_spoiled


def lose_a_micro_batch(training: Training) -> None:
    def spoil(unit: ShardedUnit) -> None:
        for placed in unit.layout.chunks:
            unit.grad_view(placed.chunk.name)[0].zero_()

    _spoil_gradients(training, 2, spoil)


def drop_a_gradient_of_a_bias(training: Training) -> None:
    _spoil_gradients(training, 1, lambda unit: unit.grad_view("blocks.0.bq")[0].zero_())


def weigh_a_token_otherwise(training: Training) -> None:
    model, calls = training.model, iter(range(10**9))
    forward_backward = model.forward_backward

    def weighed(tokens: Tensor, labels: Tensor, weights: Tensor, **more: object) -> Tensor:
        if next(calls) == 1:
            weights = weights.clone()
            weights.view(-1)[3] /= 2
        return forward_backward(tokens, labels, weights, **more)

    model.forward_backward = weighed


def keep_a_stale_shard(training: Training) -> None:
    """The first update of a block stays out of the parameters that this rank sends."""
    part = [*training.optimizer._parts.values()][1]
    update, calls = part.update, iter(range(10**9))

    def update_the_master(by: AdamWUpdate) -> None:
        before = part.unit.optim_param.clone()
        update(by)
        if next(calls) == 0:
            part.unit.optim_param.copy_(before)

    part.update = update_the_master


FAULTS: list[tuple[str, Callable[[Training], None]]] = [
    ("", lose_a_micro_batch),
    (MODERN, drop_a_gradient_of_a_bias),
    ("", weigh_a_token_otherwise),
    (LORA, weigh_a_token_otherwise),
    (MUON, weigh_a_token_otherwise),
    ("", keep_a_stale_shard),
]


def train_with_faults() -> list[Trained]:
    trained = []
    for more, plant in FAULTS:
        bad = dist.get_rank() == BAD_RANK
        flags = flags_for("IIG", world_size=4, more=more)
        trained.append(train(flags, group_size=2, before=plant if bad else None))
    return trained


@pytest.mark.verify
@pytest.mark.ranks
def test_every_fault_is_far_above_what_is_allowed() -> None:
    by_rank = run_ranks(train_with_faults, 4)
    for (more, plant), trained in zip(FAULTS, by_rank[0], strict=True):
        label = f"{plant.__name__} {more}"
        assert margin_between(trained, reference_for(more), FP32, label).ratio > 4.0, label
