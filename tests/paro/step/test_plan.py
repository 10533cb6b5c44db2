"""The list of a step's actions is what the engine does, action by action."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paro.planning.search.estimator import Estimator
from paro.planning.search.search_space import Workload
from paro.sharding.sharded_model import ShardedModel
from paro.step.actions import Action, Verb
from paro.step.plan import StepPlan
from tests.paro.planning.cases import ORDERS, order_case
from tests.paro.planning.lone_rank import LoneRank, lone_rank, silence
from tests.paro.planning.on_ranks import on_ranks

# What the optimizer and the training loop do, or the model computes.
ELSEWHERE = {Verb.UPDATE, Verb.GATHER_UPDATED, Verb.NORM, *(v for v in Verb if v >= Verb.FORWARD)}


def planned(given: Workload, strategy: str) -> StepPlan:
    return Estimator(given).costs(given.candidate(given.strategy(strategy))).plan


def engine(given: Workload, strategy: str) -> LoneRank:
    parsed, topology = on_ranks(strategy, world_size=4, group_size=2)
    return lone_rank(
        given.model,
        parsed,
        topology,
        given.precision,
        prefetch_units=given.prefetch_units,
        is_trained=given.trainable.names(given.model).__contains__,
    )


def recorded(model: object) -> list[Action]:
    assert isinstance(model, ShardedModel)
    model.record = []
    return model.record


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("strategy", ["GGG", "INI", "NIG", "NNG"])  # what is sharded, decides
def test_the_engine_does_what_the_plan_lists(
    name: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence(monkeypatch)
    for ahead in (0, 1, 2, 3):
        given = order_case(name, prefetch_units=ahead)
        rank = engine(given, strategy)
        for num_micro_batches in (1, 3):
            record = recorded(rank.model)
            rank.step(num_micro_batches)
            actions = planned(replace(given, global_batch_size=4 * num_micro_batches), strategy)
            wanted = [(verb, n) for verb, n in actions.actions() if verb not in ELSEWHERE]
            assert record == wanted, f"{ahead} units ahead, {num_micro_batches} micro-batches"


@pytest.mark.parametrize("strategy", ["GGG", "NIG"])
def test_an_evaluation_gathers_every_unit_once(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence(monkeypatch)
    rank = engine(order_case("tied"), strategy)
    tokens_BS = torch.zeros(1, 16, dtype=torch.int64)
    record = recorded(rank.model)
    rank.model.evaluate(tokens_BS, tokens_BS, torch.ones(1, 16))
    waits = [(Verb.WAIT, number) for number in (0, 1, 2, 3, 4, 0)]
    assert [action for action in record if action[0] is Verb.WAIT] == waits
    moved = {verb: [n for v, n in record if v is verb] for verb in (Verb.GATHER, Verb.RELEASE)}
    for numbers in moved.values():
        assert sorted(numbers) == ([0, 0, 1, 2, 3, 4] if strategy == "GGG" else [])
