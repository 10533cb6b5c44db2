"""Turns of a race that are timed during computation, and the use of their times."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paro.collectives.schedule import Op
from paro.distributed.comm_stream import DONE
from paro.distributed.control import Control
from paro.distributed.process_group import RuntimeConfig
from paro.distributed.registered_memory import RegisteredMemory
from paro.distributed.world import World
from paro.measuring import race
from paro.measuring.race import BUSY_ROUNDS, Race
from paro.measuring.trial import Move
from paro.topology import make_topology

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
    monkeypatch.setattr(race, "make_collectives", lambda *_, **__: Still())
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
