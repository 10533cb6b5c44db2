"""Timed runs of collectives: groups and their memory, the first one, runs while computing."""

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
from paro.measuring import benchmark, memory
from paro.measuring.benchmark import CollectiveBenchmark, TimedCollective, zero_input
from paro.topology import Spans, make_topology
from tests.helpers.fake_nccl import FakeNccl
from tools.collective_timing import rounds
from tools.collective_timing.rounds import BUSY_ROUNDS, run_rounds

TOPOLOGY = make_topology(world_size=4, group_size=2, degrees=())


def alone() -> Control:
    return Control(World(), torch.device("cpu"))


def benchmark_of(rounds: int, **more: Any) -> CollectiveBenchmark:
    """A benchmark of one algorithm, on this rank alone."""
    return CollectiveBenchmark(
        control=alone(),
        topology=TOPOLOGY,
        runtime=RuntimeConfig(distributed_backend="gloo"),
        algorithms=("native",),
        rounds=rounds,
        **more,
    )


class Still:
    """Collectives that leave every buffer unchanged."""

    groups = SimpleNamespace(registered=RegisteredMemory())

    def __getattr__(self, _name: str) -> Any:
        return lambda *_: DONE


@pytest.mark.parametrize("name", ["native", "flat"])
def test_only_the_groups_of_gathers_and_reductions_are_made(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    nccl = FakeNccl(monkeypatch)
    axes = TOPOLOGY.axes
    with benchmark_of(1).collectives(name, frozenset({axes})):
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

    monkeypatch.setattr(benchmark, "time_of", timed)
    monkeypatch.setattr(benchmark, "synchronize", lambda _device: None)
    timed_op = TimedCollective(op=Op.ALL_GATHER, span=TOPOLOGY.axes, numel=60, dtype=torch.float32)
    zeros = zero_input(timed_op, 0, torch.device("cpu"))
    for device_type, ahead in (("cpu", []), ("cuda", ["run"])):
        device = SimpleNamespace(type=device_type)
        control = replace(alone(), device=device)
        made = replace(benchmark_of(1), control=control)
        run = made.run(Noted(), zeros, 3)  # type: ignore[arg-type]
        assert events == [*ahead, "begin", "run", "run", "run", "end"]
        assert run.seconds == 2.0
        events.clear()


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


CONFIG = RuntimeConfig(distributed_backend="gloo")
MB = 10**6


class SimulatedDevice:
    """A group takes memory when it is made and first used; the first one also loads kernels."""

    def __init__(self, *, kernels: int) -> None:
        self.free = 1000 * MB
        self.kernels = kernels
        self.closed = 0

    def make(self, _topology: object, _rank: int, spans: Spans, *_: object, **__: object) -> None:
        (((span,)),) = spans.values()
        self.free -= 10 * MB * len(span) + self.kernels
        self.kernels = 0

    def run(self, request: Request) -> SimulatedDevice:
        self.free -= (3 if request.op is Op.ALL_GATHER else 4) * MB
        return self

    def wait(self) -> None:
        return None

    def close(self) -> None:
        self.closed += 1


def test_the_largest_group_counts_and_the_first_loads_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = SimulatedDevice(kernels=50 * MB)
    monkeypatch.setattr(memory, "make_groups", device.make)
    monkeypatch.setattr(memory, "make_collectives", lambda *_: device)
    control = Control(World(), torch.device("cpu"))
    found = memory.measure_communicators(control, TOPOLOGY, CONFIG, free=lambda: device.free)
    assert found == (24 * MB, 50 * MB)
    assert device.closed == 7  # the first, and both uses of two axes and of all
