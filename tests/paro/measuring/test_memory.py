"""Memory of communicators on a device whose free bytes are simulated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paro.collectives.interface import Request
from paro.collectives.schedule import Op
from paro.distributed.control import Control
from paro.distributed.process_group import RuntimeConfig
from paro.distributed.world import World
from paro.measuring import memory
from paro.topology import Spans, make_topology
from tests.paro.planning.cases import DEVICE
from tools.collective_timing.results import memory_line

TOPOLOGY = make_topology(world_size=4, group_size=2, degrees=())
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


def test_the_figures_are_in_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = 24 * MB, 50 * MB
    monkeypatch.setattr(memory, "measure_communicators", lambda *_, **__: measured)
    given = replace(DEVICE, reserved_bytes=400 * MB, communicator_bytes=None)
    gpu = Control(World(), torch.device("cuda", 0))
    found = memory.with_communicators(given, gpu, TOPOLOGY, CONFIG)
    assert found == replace(given, reserved_bytes=450 * MB, communicator_bytes=24 * MB)
    assert memory_line(found) == "memory: 450.0 MB without a model; of a communicator: 24.0 MB"


def test_cpu_ranks_have_no_communicators() -> None:
    given = replace(DEVICE, reserved_bytes=400 * MB, communicator_bytes=None)
    control = Control(World(), torch.device("cpu"))
    assert memory.with_communicators(given, control, TOPOLOGY, CONFIG) == given
    assert memory_line(given).endswith("of a communicator: none, gloo has no communicators")


def test_memory_that_torch_holds_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.synchronize", lambda _: None)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (30, 100))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _: 20)
    assert memory.available_bytes(torch.device("cuda", 0)) == 50
