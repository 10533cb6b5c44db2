"""A measurement at the start: what is timed and what is inferred; timed runs of collectives."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paro.collectives.interface import CollectiveRequest
from paro.collectives.schedule import Op
from paro.config.run import RunConfig
from paro.distributed.comm_stream import DONE, Event
from paro.distributed.control import Control
from paro.distributed.groups import RegisteredMemory
from paro.distributed.process_group import RuntimeConfig
from paro.distributed.timers import ActionTime
from paro.distributed.world import World
from paro.machine.machine import Machine
from paro.machine.machine import seconds as seconds_of
from paro.measuring import benchmark, memory
from paro.measuring.benchmark import (
    SIZES,
    CheckedInput,
    CollectiveBenchmark,
    TimedCollective,
    TimedRun,
    time_links,
    with_measured,
    zero_input,
)
from paro.measuring.device import PartsOfStep
from paro.measuring.start import affordable, layers_that_fit, one_rank
from paro.topology import Axes, Spans, axes_of, make_topology
from tests.helpers.fake_nccl import FakeNccl
from tests.helpers.refusals import refused
from tests.paro.config.test_run import SMALL, configure

AUTO = f"{SMALL} --distributed-backend gloo --paro-strategy auto"
LATENCY, PER_BYTE = 1e-3, 1e-6  # of every simulated collective


def tokens(config: RunConfig) -> tuple[int, int]:
    return config.batches.micro_batch_size, config.data.seq_length


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ("", (2, 32)),
        ("--recompute-granularity full --trainable last-blocks:0.5 --skip-train", (2, 32)),
        ("--context-parallel-size 2 --num-layers 2", (2, 16)),
        ("--bf16 --optimizer muon --paro-inter-bits auto", (2, 32)),
        ("--rampup-batch-size 8 8 96 --lora-rank 2", (2, 32)),
    ],
)
def test_one_rank_computes_the_run_s_micro_batch_alone(flags: str, kept: tuple[int, int]) -> None:
    run = configure(f"{AUTO} {flags}")
    lone = one_rank(run)
    assert tokens(lone) == kept
    assert (lone.world.size, lone.strategy.degrees) == (1, (1, 1, 1))
    assert lone.model.num_layers == run.model.num_layers
    assert lone.model.recompute is None
    assert lone.trained  # something does, whatever part of the run's model


def test_as_many_layers_are_timed_as_fit_a_rank() -> None:
    lone = one_rank(configure(f"{AUTO} --num-layers 9"))
    assert layers_that_fit(lone.spec, 10**9) == 4
    assert layers_that_fit(one_rank(configure(f"{AUTO} --num-layers 3")).spec, 10**9) == 3
    assert 1 <= layers_that_fit(lone.spec, 3_000_000) < 4
    message = refused(
        lambda: layers_that_fit(lone.spec, 10**5), "one block ... give --paro-machine"
    )
    assert "100.0 kB" in message


@pytest.mark.parametrize(
    ("of_layer", "of_token", "layers", "left", "warmup"),
    [
        (1e-3, 1e-7, 4, (4, 4096), 2),  # all of it is fast
        (1e-3, 2.5e-5, 4, (2, 4096), 2),
        (0.4, 1e-5, 2, (4, 4096), 2),  # an update takes long: fewer layers
        (3.0, 2.5e-4, 1, (1, 4000), 1),  # of one layer too: fewer steps
        (1e-3, 2e-2, 1, (1, 64), 1),
    ],
)
def test_what_is_timed_takes_no_minutes(
    of_layer: float, of_token: float, layers: int, left: tuple[int, int], warmup: int
) -> None:
    flags = "--micro-batch-size 4 --seq-length 4096 --max-position-embeddings 4096 --num-layers 9"
    tried: list[float] = []

    def took(trial: RunConfig) -> PartsOfStep:
        size, length = tokens(trial)
        tried.append(trial.model.num_layers * of_token * size * length)
        return PartsOfStep(micro_batch=tried[-1], update=trial.model.num_layers * of_layer)

    lone = one_rank(configure(f"{AUTO} {flags}"))
    timed, effort = affordable(lone, 4, took)
    assert (effort.num_layers, tokens(timed), effort.warmup) == (layers, left, warmup)
    assert max(tried[1:], default=0.0) <= 1.0  # the first is as short as any can be
    slow = PartsOfStep(micro_batch=1.0, update=4.0)
    refused(lambda: affordable(lone, 4, lambda _: slow), "one block ... give --paro-machine")


def timed(
    monkeypatch: pytest.MonkeyPatch, seconds: float, most_bytes: int, per_byte: float = PER_BYTE
) -> Machine:
    """The machine of links whose collectives all take a latency and a time per byte."""

    count = itertools.count(1)

    def run(
        _benchmark: CollectiveBenchmark, _made: object, checked: CheckedInput, _repeats: int
    ) -> TimedRun:
        num_bytes = checked.collective.num_bytes
        disturbed = 40 if num_bytes == SIZES[1] and next(count) % 4 == 3 else 1
        seconds = LATENCY + per_byte * num_bytes
        return TimedRun(disturbed * seconds, correct=True, cpu_seconds=1e-4)

    monkeypatch.setattr(benchmark, "make_groups", lambda *_, **__: None)
    monkeypatch.setattr(benchmark, "make_collectives", lambda *_: Still())
    monkeypatch.setattr(CollectiveBenchmark, "run", run)
    said: list[str] = []
    spans = [(axis,) for axis in TOPOLOGY.axes]
    found = time_links(
        benchmark_of(3), spans, most_bytes=most_bytes, seconds=seconds, say=said.append
    )
    assert said == [f"links, {axes_of(span).value}" for span in spans]
    machine = Machine(name="links", source="", world_size=4, group_size=2)
    return with_measured(machine, found, None, source="simulated")


@pytest.mark.parametrize(
    ("seconds", "most_bytes", "largest"),
    [
        (0.0, 2**30, SIZES[1]),  # of two sizes follow latency and bandwidth
        (1e4, 2**20, 2**20),
        (1e4, 2**19, 2**20),
        (6 * 10.0, 2**30, 2**20),  # it is expected to take 4.5 s, and 4 MiB 18
        (6 * 30.0, 2**30, 2**22),
    ],
)
def test_sizes_grow_while_there_is_time(
    monkeypatch: pytest.MonkeyPatch, seconds: float, most_bytes: int, largest: int
) -> None:
    machine = timed(monkeypatch, seconds, most_bytes)
    for axes in (Axes.INTRA, Axes.INTER):
        for op in Op:
            rows = [row for row in machine.measured if (row.axes, row.op) == (axes, op)]
            expected = [size for size in SIZES if size <= largest]
            assert [row.bytes for row in rows] == expected
            assert rows[1].seconds == pytest.approx(LATENCY + PER_BYTE * SIZES[1])
    assert machine.intra is not None
    assert machine.inter is not None


@pytest.mark.parametrize(
    ("most_bytes", "largest"), [(2**30, 2**22), (2**20, 2**20), (2**17, 2**18), (1, SIZES[1])]
)
def test_a_curve_of_little_time_says_how_fast_large_messages_are(
    monkeypatch: pytest.MonkeyPatch, most_bytes: int, largest: int
) -> None:
    machine = timed(monkeypatch, 0.0, most_bytes, per_byte=1e-9)  # 4 MiB take 5 ms, 4 KiB 1 ms
    sizes = {row.bytes for row in machine.measured}
    assert sizes == {SIZES[0], largest}
    took = seconds_of(machine, Op.ALL_GATHER, Axes.INTER, "native", 2**26)
    assert took == pytest.approx(LATENCY + 2**26 * 1e-9, rel=0.01)


TOPOLOGY = make_topology(world_size=4, group_size=2, degrees=())


def alone() -> Control:
    return Control(World(), torch.device("cpu"))


def benchmark_of(rounds: int) -> CollectiveBenchmark:
    """A benchmark of one algorithm, on this rank alone."""
    return CollectiveBenchmark(
        control=alone(),
        topology=TOPOLOGY,
        runtime=RuntimeConfig(distributed_backend="gloo"),
        algorithms=("native",),
        rounds=rounds,
    )


class Still:
    """Collectives that leave every buffer unchanged."""

    groups = SimpleNamespace(registered=RegisteredMemory())

    def __getattr__(self, _name: str) -> Any:
        return lambda *_: DONE


@pytest.mark.parametrize("name", ["native", "flat"])
def test_only_needed_groups_are_made(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
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
        def run(self, _request: CollectiveRequest) -> Event:
            events.append("run")
            return DONE

    def timed(action: Callable[[], None], _device: torch.device) -> ActionTime:
        events.append("begin")
        action()
        events.append("end")
        return ActionTime(6.0, 0.0)

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


CONFIG = RuntimeConfig(distributed_backend="gloo")
MB = 10**6


class SimulatedDevice:
    """A group takes memory when it is made and first used; the first one also loads kernels."""

    def __init__(self, *, kernels: int) -> None:
        self.used = 0
        self.kernels = kernels
        self.closed = 0

    def make(self, _topology: object, _rank: int, spans: Spans, *_: object, **__: object) -> None:
        (((span,)),) = spans.values()
        self.used += 10 * MB * len(span) + self.kernels
        self.kernels = 0

    def run(self, request: CollectiveRequest) -> SimulatedDevice:
        self.used += (3 if request.op is Op.ALL_GATHER else 4) * MB
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
    monkeypatch.setattr(memory, "bytes_in_use", lambda _: device.used)
    found = memory.measure_communicators(control, TOPOLOGY, CONFIG)
    assert found == (24 * MB, 50 * MB)
    assert device.closed == 7  # the first, and both uses of two axes and of all
