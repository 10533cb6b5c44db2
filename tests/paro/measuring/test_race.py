"""Turns of a race that are timed during computation, and the use of their times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paro.collectives.interface import Request
from paro.collectives.schedule import Op
from paro.distributed.comm_stream import DONE, Event
from paro.distributed.control import Control
from paro.distributed.process_group import RuntimeConfig
from paro.distributed.registered_memory import RegisteredMemory
from paro.distributed.timers import Took
from paro.distributed.world import World
from paro.measuring import race
from paro.measuring.race import BUSY_ROUNDS, Race
from paro.measuring.trial import Move, make_trial
from paro.topology import make_topology
from tests.helpers.fake_nccl import FakeNccl

TOPOLOGY = make_topology(world_size=4, group_size=2, degrees=())


def alone() -> Control:
    return Control(World(), torch.device("cpu"))


def raced(rounds: int, **more: Any) -> Race:
    """A race of one algorithm, on this rank alone."""
    return Race(
        control=alone(),
        topology=TOPOLOGY,
        runtime=RuntimeConfig(distributed_backend="gloo"),
        algorithms=("native",),
        rounds=rounds,
        **more,
    )


class Still:
    """Collectives that leave every buffer unchanged."""

    registered = RegisteredMemory()

    def __getattr__(self, _name: str) -> Any:
        return lambda *_: DONE


@pytest.mark.parametrize("while_computing", [False, True])
def test_the_last_rounds_are_timed_while_computing_too(
    monkeypatch: pytest.MonkeyPatch, while_computing: bool
) -> None:
    monkeypatch.setattr(race, "make_groups", lambda *_: None)
    monkeypatch.setattr(race, "make_collectives", lambda *_: Still())
    busy: list[bool] = []
    visit = Race._visit

    def watched(self: Race, *args: Any, busy_too: bool) -> Any:
        busy.append(busy_too)
        return visit(self, *args, busy_too=busy_too)

    monkeypatch.setattr(Race, "_visit", watched)
    move = Move(op=Op.ALL_GATHER, span=TOPOLOGY.axes, numel=64, dtype=torch.float32)
    (outcome,) = raced(4, while_computing=while_computing).run([move])
    # The first round does not count.
    assert busy == [False] * (5 - BUSY_ROUNDS) + [while_computing] * BUSY_ROUNDS
    assert len(outcome.seconds_by_round) == 4
    assert (outcome.busy_seconds is not None) is while_computing
    assert outcome.correct is False


@pytest.mark.parametrize("name", ["native", "flat"])
def test_only_the_groups_of_gathers_and_reductions_are_made(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    nccl = FakeNccl(monkeypatch)
    axes = TOPOLOGY.axes
    with raced(1).collectives(name, frozenset({axes})):
        members = [tuple(call["ranks"]) for call in nccl.calls if 0 in call["ranks"]]
    spans = [axes] if name == "flat" else [(axis,) for axis in axes]
    assert members == [TOPOLOGY.members(span, 0) for span in spans] * 2


def test_on_a_gpu_ranks_begin_with_a_collective_that_is_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []

    class Noted(Still):
        def run(self, _request: Request) -> Event:
            events.append("run")
            return DONE

    def timed(action: Callable[[], None], _device: torch.device) -> Took:
        events.append("begin")
        action()
        events.append("end")
        return Took(6.0, 0.0)

    monkeypatch.setattr(race, "time_of", timed)
    monkeypatch.setattr(race, "synchronize", lambda _device: None)
    move = Move(op=Op.ALL_GATHER, span=TOPOLOGY.axes, numel=60, dtype=torch.float32)
    trial = make_trial(move, range(4), 0, torch.device("cpu"))
    for device_type, ahead in (("cpu", []), ("cuda", ["run"])):
        device = SimpleNamespace(type=device_type)
        control = replace(alone(), device=device)
        turn = replace(raced(1), control=control).turn(Noted(), trial, 3)  # type: ignore[arg-type]
        assert events == [*ahead, "begin", "run", "run", "run", "end"]
        assert turn.seconds == 2.0
        events.clear()
