"""The list of a step's actions is what the engine does, action by action."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import replace
from functools import partial
from itertools import chain, product
from typing import Any

import pytest
import torch

from model.config import LoraConfig, targets_of
from paro.distributed.comm_stream import Event
from paro.layout import Unit, UnitLayout
from paro.planning.estimator import Estimator
from paro.planning.search_space import PlanRequest
from paro.sharding.distributed_model import DistributedModel
from paro.spec.run_spec import Materialize
from paro.step.actions import Action, ActionKind, Buckets, number_buffers
from paro.step.gathering import ParamAllGatherPolicy
from paro.step.schedule import StepSchedule
from tests.helpers.late_streams import LateStreams
from tests.paro.planning.cases import (
    BF16,
    ORDERS,
    LoneRank,
    costs,
    machine,
    order_case,
    rank_of,
    schedule_of,
    silence,
)

# What the optimizer and the training loop do, or the model computes.
ELSEWHERE = {
    ActionKind.UPDATE,
    ActionKind.NORM,
    *(v for v in ActionKind if v >= ActionKind.FORWARD),
}

FLAT = UnitLayout((), matrix_stop=0, numel=8)


def engine(given: PlanRequest, strategy: str) -> LoneRank:
    run = Estimator(given).run_spec(given.candidate(given.strategy(strategy)))
    return rank_of(run)


def recorded(rank: LoneRank) -> list[Action]:
    record: list[Action] = []

    def carry_out(actions: Iterable[Action]) -> None:
        for action in actions:
            DistributedModel.carry_out(rank.model, [action])
            record.append(action)

    rank.model.carry_out = carry_out  # type: ignore[method-assign]
    return record


def from_forward_on(listed: StepSchedule, kinds: Container[ActionKind]) -> list[Action]:
    """Actions of `kinds` in a step that begins with the forward, not the update."""
    at_once = [
        move
        for move in chain.from_iterable(listed.update)
        if move[0] is ActionKind.PARAM_ALL_GATHER
    ]
    moves = [move for move in listed.actions() if move[0] in kinds]
    return moves[len(at_once) :] + at_once


AHEAD = ((0, None), (1, 2), (2, 4), (3, None))


# What is sharded decides. Every second pair is there without `verify`.
PAIRS = [
    pytest.param(name, strategy, marks=[pytest.mark.verify] * ((i + j) % 2))
    for (i, name), (j, strategy) in product(
        enumerate(ORDERS), enumerate(("GGG", "NNG", "NIG", "INI"))
    )
]


@pytest.mark.slow("trains a step")
@pytest.mark.parametrize(("name", "strategy"), PAIRS)
def test_the_engine_does_what_the_plan_lists(
    name: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every number of units ahead under every strategy, and two of each order of units."""
    silence(monkeypatch)
    for ahead, updated in AHEAD[[*ORDERS].index(name) // 2 % 2 :: 2]:
        given = order_case(name, prefetch_units=ahead, updated_ahead=updated)
        rank = engine(given, strategy)
        rank.step(1)
        for num_micro_batches in (1, 3):
            record = recorded(rank)
            rank.step(num_micro_batches)
            several = replace(given, global_batch_size=4 * num_micro_batches)
            listed = schedule_of(costs(several, strategy))
            wanted = from_forward_on(listed, {*ActionKind} - ELSEWHERE)
            assert record == wanted, f"{ahead}, {updated} units ahead"


@pytest.mark.parametrize(("name", "num_buckets"), [("recomputed in pairs", 2), ("tied", 1)])
@pytest.mark.parametrize("ahead", [None, 3])
def test_a_bucket_is_reduced_and_gathered_once(
    name: str, num_buckets: int, ahead: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 3 blocks one is left over. Muon updates in an order of its own."""
    silence(monkeypatch)
    muon = replace(BF16, optimizer="muon")
    given = order_case(name, prefetch_units=1, updated_ahead=ahead, precision=muon)
    rank = engine(given, "IIG")
    rank.step(1)
    record = recorded(rank)
    rank.step(2)
    listed = schedule_of(costs(given, "IIG"))
    wanted = from_forward_on(listed, {*ActionKind} - ELSEWHERE)
    moves = [move for move in wanted if move[0] is not ActionKind.PARAM_ALL_GATHER]
    assert [move for move in record if move[0] is not ActionKind.PARAM_ALL_GATHER] == moves
    assert sorted(record) == sorted(wanted)
    num_blocks = given.model.num_layers
    for kind in (ActionKind.GRAD_SYNC, ActionKind.PARAM_ALL_GATHER):
        assert sum(move[0] is kind for move in record) == 2 + num_blocks - num_buckets


@pytest.mark.parametrize("strategy", ["GGG", "NIG"])
def test_an_evaluation_gathers_units_once(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    silence(monkeypatch)
    rank = engine(order_case("tied"), strategy)
    tokens_BS = torch.zeros(1, 16, dtype=torch.int64)
    record = recorded(rank)
    rank.model.evaluate(tokens_BS, tokens_BS, torch.ones(1, 16))
    waits = [(ActionKind.WAIT, number) for number in (0, 1, 2, 3, 4, 0)]
    assert [action for action in record if action[0] is ActionKind.WAIT] == waits
    moved = {
        kind: [n for action_kind, n in record if action_kind is kind]
        for kind in (ActionKind.GATHER, ActionKind.RELEASE)
    }
    for numbers in moved.values():
        assert sorted(numbers) == ([0, 0, 1, 2, 3, 4] if strategy == "GGG" else [])


# Where weights rotate

WAYS = (Materialize.ROTATE, Materialize.ROTATE_IN_PLACE)


def by_buffer(moves: list[Action]) -> dict[int, list[Action]]:
    found: defaultdict[int, list[Action]] = defaultdict(list)
    for move in moves:
        found[move[1]].append(move)
    return dict(found)


def check(given: PlanRequest, strategy: str) -> None:
    rank = engine(given, strategy)
    rank.step(1)
    for num_micro_batches in (1, 2):
        record = recorded(rank)
        rank.step(num_micro_batches)
        size = given.machine.world_size * num_micro_batches
        listed = schedule_of(costs(replace(given, global_batch_size=size), strategy))
        wanted = from_forward_on(listed, {*ActionKind} - ELSEWHERE)
        assert by_buffer(record) == by_buffer(wanted)
        shifts = [move for move in record if move[0] in (ActionKind.SHIFT, ActionKind.SHIFT_BACK)]
        assert shifts == [
            move for move in wanted if move[0] in (ActionKind.SHIFT, ActionKind.SHIFT_BACK)
        ]


def larger_ring(size: int) -> dict[str, Any]:
    return {
        "model": replace(
            ORDERS["recomputed in pairs"][0], num_attention_heads=12, num_query_groups=12
        ),
        "machine": machine(world_size=2 * size, group_size=size),
        "group_size": size,
        "global_batch_size": 2 * size,
    }


def adapters(targets: str) -> dict[str, Any]:
    lora = LoraConfig(rank=2, targets=targets_of(targets))
    return {"model": replace(ORDERS["recomputed"][0], lora=lora)}


ROTATED: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {"updated_ahead": 2}) for name in ORDERS},
    **{f"a ring of {size}": ("plain", larger_ring(size)) for size in (3, 4)},
    **{f"adapters on {name}": ("plain", adapters(name)) for name in ("all-linear", "o_proj")},
}


@pytest.mark.slow("trains a step")
@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=[pytest.mark.verify] * ((i + j) % 2))
        for (i, name), (j, way) in product(enumerate(ROTATED), enumerate(WAYS))
    ],
)
def test_it_rotates_as_listed(name: str, way: Materialize, monkeypatch: pytest.MonkeyPatch) -> None:
    silence(monkeypatch)
    order, changes = ROTATED[name]
    check(replace(order_case(order, materialize=way), **changes), "IIG")


def test_an_evaluation_moves_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    silence(monkeypatch)
    for way in WAYS:
        rank = engine(order_case("tied", materialize=way), "IIG")
        record = recorded(rank)
        tokens_BS = torch.zeros(1, 16, dtype=torch.int64)
        rank.model.evaluate(tokens_BS, tokens_BS, torch.ones(1, 16))
        kinds = {move[0] for move in record}
        moves = {
            ActionKind.WAIT,
            ActionKind.ALLOCATE_SLOT,
            ActionKind.FREE_SLOT,
            ActionKind.SHIFT,
            ActionKind.WAIT_SHIFTED,
        }
        assert kinds == moves
        assert all(
            to != 0 for kind, _, *slots in record if kind is ActionKind.SHIFT for to in slots[1:]
        )


# When updated parameters are gathered


def gathered_before_the_first_unit(way: Materialize, ahead: int | None, seed: int) -> set[int]:
    """The buffers whose updates have been sent when the first gather, or shift, is done."""
    streams = LateStreams(seed, eager=0.0, in_order=True)
    sent: set[int] = set()
    updated: dict[int, Event] = {}
    inside: dict[int, Event] = {}
    given = order_case("plain", materialize=way, updated_ahead=ahead)
    for kind, number, *_ in schedule_of(costs(given, "IIG")).actions():
        if kind is ActionKind.PARAM_ALL_GATHER:
            updated[number] = streams.submit("between", partial(sent.add, number))
        elif kind in (ActionKind.GATHER, ActionKind.SHIFT):
            inside[number] = streams.submit("inside", lambda: None, after=updated[number])
        elif kind in (ActionKind.WAIT, ActionKind.WAIT_SHIFTED) and number in inside:
            inside[number].wait()
            break
        elif kind is ActionKind.WAIT:
            updated[number].wait()
    return sent


def test_a_bucket_is_sent_while_the_one_before_computes() -> None:
    sizes = (1, 3, 0, 0, 3, 0, 0, 1)
    units = number_buffers(
        [Unit(name=str(n), trainable=FLAT, bucket_size=each) for n, each in enumerate(sizes)]
    )
    policy = ParamAllGatherPolicy([unit.needed for unit in units], 2, Buckets(units))
    at_once = [move for buffer in range(8) for move in policy.updated(buffer)]
    later = {index: policy.before_forward(index) for index in range(8)}
    assert at_once == [(ActionKind.PARAM_ALL_GATHER, 0), (ActionKind.PARAM_ALL_GATHER, 1)]
    assert {index: moves for index, moves in later.items() if moves} == {
        0: [(ActionKind.PARAM_ALL_GATHER, 4)],
        5: [(ActionKind.PARAM_ALL_GATHER, 7)],
    }


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("way", "own", "num_buffers"),
    # Where weights rotate, the first part needs the norms too.
    [(Materialize.GATHER, {0}, 5), (Materialize.ROTATE, {0, 1}, 9)],
)
def test_the_first_gather_needs_its_own_unit_alone(
    way: Materialize, own: set[int], num_buffers: int, seed: int
) -> None:
    assert gathered_before_the_first_unit(way, 2, seed) == own
    assert gathered_before_the_first_unit(way, None, seed) == {*range(num_buffers - 1)}
