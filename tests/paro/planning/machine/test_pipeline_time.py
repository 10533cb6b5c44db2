"""The predicted time of a pipeline is that of its stages, run one by one on each level."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paro.collectives.schedule import Op
from paro.planning.machine.collective_time import (
    CollectiveTimes,
    fastest_pieces,
    pipeline_seconds,
)
from paro.planning.machine.machine import Machine
from paro.topology import make_topology
from tests.paro.planning.cases import DEVICE, speed

SPAN = make_topology(world_size=12, group_size=4, degrees=()).axes
NUM_BYTES = 48_000_000


def machine(intra: float, inter: float, latency: float = 0.0) -> Machine:
    """Links of so many bytes per second."""
    within, between = (speed(8e-9 * rate, latency) for rate in (intra, inter))
    return Machine(
        name="m", source="", world_size=12, group_size=4, intra=within, inter=between, device=DEVICE
    )


@pytest.mark.parametrize("pieces", [1, 4])
def test_the_shorter_level_hides_but_for_a_piece(pieces: int) -> None:
    for inter in (1e8, 4e9):
        given = machine(1e9, inter)
        within, between = 0.75 * NUM_BYTES / 1e9, 2 / 3 * NUM_BYTES / 4 / inter
        both = max(within, between) + min(within, between) / pieces
        for op in (Op.ALL_GATHER, Op.REDUCE_SCATTER):
            found = pipeline_seconds(given, op, SPAN, NUM_BYTES, pieces)
            assert found == pytest.approx(both, rel=1e-9)


def test_an_all_reduce_is_inside_before_and_after_it_is_between() -> None:
    slow, within = machine(1e9, 1e7), 0.75 * NUM_BYTES / 1e9
    between = 2 * 2 / 3 * NUM_BYTES / 4 / 1e7
    found = pipeline_seconds(slow, Op.ALL_REDUCE, SPAN, NUM_BYTES, 4)
    assert found == pytest.approx(between + 2 * within / 4, rel=1e-9)
    fast = machine(1e9, 1e13)
    found = pipeline_seconds(fast, Op.ALL_REDUCE, SPAN, NUM_BYTES, 4)
    assert found == pytest.approx(2 * within, rel=1e-3)


@pytest.mark.parametrize("op", Op)
def test_more_pieces_pay_until_latency_does_not(op: Op) -> None:
    assert fastest_pieces(machine(1e9, 1e8), op, SPAN, NUM_BYTES) == 8
    assert fastest_pieces(machine(1e9, 1e8, latency=1.0), op, SPAN, NUM_BYTES) == 1


def test_gpus_run_pipelines_and_cpu_ranks_single_messages() -> None:
    gpus = machine(1e9, 3e8, latency=1e-5)
    ours = CollectiveTimes(gpus, "ho-ring").seconds(Op.ALL_GATHER, SPAN, NUM_BYTES)
    pieces = fastest_pieces(gpus, Op.ALL_GATHER, SPAN, NUM_BYTES)
    assert ours == pipeline_seconds(gpus, Op.ALL_GATHER, SPAN, NUM_BYTES, pieces)
    native = CollectiveTimes(gpus, "native").seconds(Op.ALL_GATHER, SPAN, NUM_BYTES)
    within, between = (0.75 * NUM_BYTES / 1e9, 2 / 3 * NUM_BYTES / 4 / 3e8)
    assert max(within, between) < ours < native
    cpus = replace(gpus, device=replace(DEVICE, cores=1.0))
    assert CollectiveTimes(cpus, "ho-ring").seconds(Op.ALL_GATHER, SPAN, NUM_BYTES) < ours


@pytest.mark.parametrize("pieces", [1, 4])
def test_levels_on_the_same_links_do_not_overlap(pieces: int) -> None:
    """Groups of 6 ranks on nodes of 2: both levels of a pipeline use NICs."""
    given = replace(machine(1e9, 1e8), group_size=2)
    span = make_topology(world_size=12, group_size=6, degrees=()).axes
    took = [
        CollectiveTimes(given, "native").seconds(op, part, size)
        for op, part, size in (
            (Op.ALL_GATHER, span[:1], NUM_BYTES),
            (Op.ALL_GATHER, span[1:], NUM_BYTES // 6),
        )
    ]
    found = pipeline_seconds(given, Op.ALL_GATHER, span, NUM_BYTES, pieces)
    assert found == pytest.approx(sum(took), rel=1e-9)
    inside = replace(given, group_size=12)
    assert pipeline_seconds(inside, Op.ALL_GATHER, span, NUM_BYTES, pieces) < found
    for one in (given, inside, replace(given, device=replace(DEVICE, cores=1.0))):
        jobs = CollectiveTimes(one, "ho-ring").phases(Op.ALL_GATHER, span, NUM_BYTES)[0]
        assert sum(job.intra + job.inter for job in jobs) == pytest.approx(1.0)
