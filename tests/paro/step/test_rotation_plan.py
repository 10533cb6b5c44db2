"""The list of actions where weights rotate is what the engine does, buffer by buffer."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from model.config import LoraConfig, targets_of
from paro.planning.search_space import PlanRequest
from paro.spec.run_spec import Materialize
from paro.step.actions import Move, Verb
from tests.paro.planning.cases import ORDERS, costs, machine, order_case, schedule_of
from tests.paro.planning.lone_rank import silence
from tests.paro.step.test_schedule import ELSEWHERE, engine, from_forward_on

WAYS = (Materialize.ROTATE, Materialize.ROTATE_IN_PLACE)


def by_buffer(moves: list[Move]) -> dict[int, list[Move]]:
    found: defaultdict[int, list[Move]] = defaultdict(list)
    for move in moves:
        found[move[1]].append(move)
    return dict(found)


def check(given: PlanRequest, strategy: str) -> None:
    rank = engine(given, strategy)
    rank.step(1)
    for num_micro_batches in (1, 2):
        record = rank.model.record = []
        rank.step(num_micro_batches)
        size = given.machine.world_size * num_micro_batches
        schedule = schedule_of(costs(replace(given, global_batch_size=size), strategy))
        wanted = from_forward_on(schedule, {*Verb} - ELSEWHERE)
        assert by_buffer(record) == by_buffer(wanted)
        shifts = [move for move in record if move[0] in (Verb.SHIFT, Verb.SHIFT_BACK)]
        assert shifts == [move for move in wanted if move[0] in (Verb.SHIFT, Verb.SHIFT_BACK)]


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("way", WAYS)
def test_the_engine_does_what_the_plan_lists(
    name: str, way: Materialize, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence(monkeypatch)
    check(order_case(name, materialize=way, updated_ahead=2), "IIG")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [3, 4])
def test_larger_rings(size: int, way: Materialize, monkeypatch: pytest.MonkeyPatch) -> None:
    silence(monkeypatch)
    config, _ = ORDERS["recomputed in pairs"]
    config = replace(config, num_attention_heads=12, num_query_groups=12)
    given = order_case("plain", materialize=way)
    given = replace(
        given,
        model=config,
        machine=machine(world_size=2 * size, group_size=size),
        group_size=size,
        global_batch_size=2 * size,
    )
    check(given, "IIG")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("targets", ["all-linear", "o_proj"])
def test_adapters(targets: str, way: Materialize, monkeypatch: pytest.MonkeyPatch) -> None:
    silence(monkeypatch)
    config, _ = ORDERS["recomputed"]
    adapted = replace(config, lora=LoraConfig(rank=2, targets=targets_of(targets)))
    check(replace(order_case("plain", materialize=way), model=adapted), "IIG")


def test_an_evaluation_moves_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    silence(monkeypatch)
    for way in WAYS:
        rank = engine(order_case("tied", materialize=way), "IIG")
        rank.model.record = record = []
        tokens_BS = torch.zeros(1, 16, dtype=torch.int64)
        rank.model.evaluate(tokens_BS, tokens_BS, torch.ones(1, 16))
        verbs = {move[0] for move in record}
        moves = {Verb.WAIT, Verb.ALLOCATE_SLOT, Verb.FREE_SLOT, Verb.SHIFT, Verb.WAIT_SHIFTED}
        assert verbs == moves
        assert all(to != 0 for verb, _, *slots in record if verb is Verb.SHIFT for to in slots[1:])
