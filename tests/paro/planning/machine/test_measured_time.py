"""Collectives of measured machines: their processor time on CPU ranks counts at every size."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paro.collectives.schedule import Op
from paro.planning.machine.collective_time import CollectiveTimes, TimedJob
from paro.planning.machine.machine import Machine, Measured
from paro.topology import Axes, make_topology
from tests.paro.planning.cases import DEVICE

CORES = 0.25


def job(num_bytes: int, *, cores: float | None = CORES) -> TimedJob:
    """An all-gather between two groups, measured at two sizes, whose small one has a fast start."""
    rows = tuple(
        Measured(
            axes=Axes.INTER,
            op=Op.ALL_GATHER,
            algorithm="native",
            bytes=size,
            seconds=seconds,
            cpu_seconds=cpu,
        )
        for size, seconds, cpu in ((64_000, 0.009, 0.0005), (256_000, 0.047, 0.0009))
    )
    device = replace(DEVICE, cores=cores)
    sizes = {"world_size": 4, "group_size": 2}
    machine = Machine(name="measured", source="", measured=rows, device=device, **sizes)
    topology = make_topology(world_size=4, group_size=2, degrees=(4,))
    span = tuple(axis for axis in topology.axes if axis.inner == 2)
    ((found,),) = CollectiveTimes(machine, "native").phases(Op.ALL_GATHER, span, num_bytes)
    return found


def test_between_measured_sizes_a_job_has_the_measured_share_of_the_cores() -> None:
    found = job(256_000)
    assert found.seconds == pytest.approx(0.047)
    assert found.cpu == pytest.approx(0.0009 / CORES / 0.047)


@pytest.mark.parametrize("num_bytes", [512, 4_000, 16_000])
def test_a_small_message_takes_at_least_its_processor_time(num_bytes: int) -> None:
    """The line through the measured sizes leaves no latency, but a call's work remains."""
    least = 0.0005 - 64_000 * 0.0004 / 192_000  # of a message without bytes
    work = least + (0.0005 - least) * num_bytes / 64_000
    found = job(num_bytes)
    assert found.seconds == pytest.approx(max(work / CORES, 0.009 * num_bytes / 64_000))
    assert found.seconds * found.cpu == pytest.approx(work / CORES)


def test_gpus_have_no_processor_time_to_lose() -> None:
    found = job(4_000, cores=None)
    assert found.cpu == 0.0
    assert found.seconds == pytest.approx(0.009 * 4_000 / 64_000)
