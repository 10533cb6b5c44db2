"""Rounds of a benchmark: which runs are timed while ranks compute, and what the results hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paro.collectives.schedule import Op
from paro.measuring import benchmark
from paro.measuring.benchmark import TimedCollective
from tests.paro.measuring.test_benchmark import TOPOLOGY, Still, benchmark_of
from tools.collective_timing import rounds
from tools.collective_timing.rounds import BUSY_ROUNDS, run_rounds


@pytest.mark.parametrize("while_computing", [False, True])
def test_the_last_rounds_are_timed_while_computing_too(
    monkeypatch: pytest.MonkeyPatch, while_computing: bool
) -> None:
    monkeypatch.setattr(benchmark, "make_groups", lambda *_, **__: None)
    monkeypatch.setattr(benchmark, "make_collectives", lambda *_: Still())
    busy: list[bool] = []
    run_algorithm = rounds.run_algorithm

    def watched(*args: Any, busy_too: bool) -> Any:
        busy.append(busy_too)
        return run_algorithm(*args, busy_too=busy_too)

    monkeypatch.setattr(rounds, "run_algorithm", watched)
    timed = TimedCollective(op=Op.ALL_GATHER, span=TOPOLOGY.axes, numel=64, dtype=torch.float32)
    (result,) = run_rounds(benchmark_of(4, while_computing=while_computing), [timed])
    # The first round does not count.
    assert busy == [False] * (5 - BUSY_ROUNDS) + [while_computing] * BUSY_ROUNDS
    assert len(result.seconds_by_round) == 4
    assert (result.busy_seconds is not None) is while_computing
    assert result.correct is False
