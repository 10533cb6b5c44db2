"""The choice by message size follows the measurements, or reports missing ones."""

from __future__ import annotations

from dataclasses import replace

from paro.collectives.schedule import Op
from paro.machine.collective_time import choice_of, chunk_count_by
from paro.machine.machine import Machine, Measured
from paro.topology import Axes, make_topology
from tests.helpers.refusals import refused
from tests.paro.planning.cases import speed


def machine(**small_and_large: tuple[float, float]) -> Machine:
    """Every algorithm's seconds for a kilobyte and for a megabyte, the same for all collectives."""
    rows = tuple(
        Measured(axes=axes, op=op, algorithm=name.replace("_", "-"), bytes=size, seconds=time)
        for name, times in small_and_large.items()
        for size, time in zip((1_000, 1_000_000), times, strict=True)
        for op in Op
        for axes in Axes
    )
    return Machine(name="m", source="typed", world_size=4, group_size=2, measured=rows)


def test_small_messages_take_the_one_that_wants_few_steps() -> None:
    choice = choice_of("auto", machine(h_ring=(1e-3, 1e-1), ho_ring=(2e-3, 5e-2)), by_nccl=False)
    assert choice.names == ("h-ring", "ho-ring")
    best = [choice.best(Op.ALL_GATHER, Axes.BOTH, size) for size in (10, 10**3, 10**6, 10**8)]
    assert best == ["h-ring", "h-ring", "ho-ring", "ho-ring"]


def test_under_nccl_rings_of_single_messages_are_not_chosen() -> None:
    rows = machine(h_ring=(1e-3, 1e-3), native=(2e-3, 2e-3), ring=(1e-3, 1e-3))
    choice = choice_of("auto", rows, by_nccl=True)
    assert choice.names == ("native",)
    rings = machine(ring=(1.0, 1.0))
    refused(lambda: choice_of("auto", rings, by_nccl=True), "no all_gather over intra axes")


def test_chunks_follow_the_links_or_the_size_alone() -> None:
    span = make_topology(world_size=32, group_size=8, degrees=()).axes
    bare = Machine(name="m", source="typed", world_size=32, group_size=8)
    known = replace(bare, intra=speed(2000, 1e-5), inter=speed(100, 1e-5))
    sizes = (10**5, 10**8, 10**10)
    assert [chunk_count_by(known)(Op.ALL_GATHER, span, size) for size in sizes] == [1, 3, 8]
    for unknown in (None, bare):
        assert [chunk_count_by(unknown)(Op.ALL_GATHER, span, size) for size in sizes] == [1, 4, 4]


def test_what_was_not_measured_is_named() -> None:
    whole = machine(native=(1.0, 2.0))
    rows = tuple(r for r in whole.measured if (r.op, r.axes) != (Op.ALL_REDUCE, Axes.INTER))
    partly = replace(whole, measured=rows)
    refused(lambda: choice_of("auto", partly, by_nccl=False), "no all_reduce over inter axes")
    # One group has no links between groups.
    one_group = replace(whole, group_size=4, measured=rows)
    assert choice_of("auto", one_group, by_nccl=False).names == ("native",)
