"""Every collective by every algorithm against sums and gathers computed here, and its bytes."""

from __future__ import annotations

from collections.abc import Collection
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paro.collectives.api import make_collectives
from paro.collectives.choice import AlgorithmChoice, needed_groups
from paro.collectives.interface import Collectives
from paro.collectives.schedule import COLLECTIVES
from paro.distributed.groups import ByteCounter, make_groups, make_resources
from paro.distributed.process_group import RuntimeConfig
from paro.topology import (
    COLLECTIVE_STREAMS,
    AxisSpan,
    Sent,
    Topology,
    by_units,
    make_topology,
    nested_range,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.requests import all_gather, all_reduce, reduce_scatter

CPU = torch.device("cpu")
SHAPES = [  # world size, group size, degrees besides; 6 ranks without overlap
    (4, 2, ()),
    (6, 3, ()),
    pytest.param(8, 4, (2, 4), marks=pytest.mark.verify),
    pytest.param(2, 2, (), marks=pytest.mark.verify),
    pytest.param(6, 2, (), marks=pytest.mark.verify),
    pytest.param(8, 2, (4,), marks=pytest.mark.verify),
]
TYPES = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
]


def whole(numel: int, dtype: torch.dtype, factor: int = 1) -> Tensor:
    """Small integers, whose sums are exact in every type; no two shards are equal."""
    return (torch.arange(numel) % 7 * factor).to(dtype)


# HO-Ring as it runs under NCCL; three chunks do not divide a shard of 24 elements' eights evenly.
PIPELINE = "ho-ring of the backend's collectives"


def make(
    name: str, topology: Topology, *, spans: Collection[AxisSpan] = (), overlap: bool = True
) -> tuple[Collectives, ByteCounter]:
    """This rank's collectives over the given runs, or over all axes."""
    resources, choice = make_resources(CPU, "gloo", overlap=overlap), AlgorithmChoice(names=(name,))
    if name == PIPELINE:
        choice = AlgorithmChoice(names=("ho-ring",), num_chunks=lambda *sent: sent[-1] % 5 + 1)
    along = dict.fromkeys(COLLECTIVE_STREAMS, frozenset(spans or {topology.axes}))
    config = RuntimeConfig(distributed_backend="gloo")
    groups = make_groups(topology, dist.get_rank(), needed_groups(choice, along), config, resources)
    return make_collectives(choice, groups), resources.traffic


def check_all(group_size: int, degrees: tuple[int, ...]) -> list[str]:
    return [
        wrong
        for name in (*COLLECTIVES, PIPELINE)
        for wrong in check_collectives(name, group_size, degrees)
    ]


def check_collectives(name: str, group_size: int, degrees: tuple[int, ...]) -> list[str]:
    """Runs every collective over every axis span; returns the wrong results.

    With every type over all axes of 4 ranks, else with one of them.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    topology = make_topology(world_size=size, group_size=group_size, degrees=degrees)
    axes = topology.axes
    spans = {axes[i:j] for i in range(len(axes) + 1) for j in range(i, len(axes) + 1)}
    collectives, _ = make(name, topology, spans=spans, overlap=size != 6)
    wrong = []
    for number, span in enumerate(sorted(spans, key=lambda span: [axis.index for axis in span])):
        members = topology.members(span, rank)
        types = TYPES if span == axes and size == 4 else TYPES[number % len(TYPES) :][:1]
        for (dtype, comm_dtype), units in product(types, {1, span[-1].size if span else 1}):
            numel = size * 24
            shard = slice(*nested_range(by_units(span, units), rank, numel))
            axes_named = f"{[axis.index for axis in span]} of {units}"
            label = f"{name} over {axes_named} as {dtype} by {comm_dtype}"

            gathered = torch.full((numel,), -1, dtype=dtype)
            gathered[shard] = whole(numel, dtype)[shard]
            all_gather(collectives, gathered, span, units=units).wait()
            if not torch.equal(gathered, whole(numel, dtype)):
                wrong.append(f"all_gather in place: {label}")
            gathered = torch.full((numel,), -1, dtype=dtype)
            if span:
                own = whole(numel, dtype)[shard].clone()
                all_gather(collectives, gathered, span, shard=own, units=units).wait()
                if not torch.equal(gathered, whole(numel, dtype)):
                    wrong.append(f"all_gather: {label}")

            total = whole(numel, dtype, sum(member % 3 for member in members))
            summed = whole(numel, dtype, rank % 3)
            reduce_scatter(collectives, summed, span, comm_dtype, units=units).wait()
            if not torch.equal(summed[shard], total[shard]):
                wrong.append(f"reduce_scatter: {label}")
            summed = whole(numel, dtype, rank % 3)
            all_reduce(collectives, summed, span, comm_dtype).wait()
            if not torch.equal(summed, total):
                wrong.append(f"all_reduce: {label}")
    collectives.close()
    return wrong


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "group_size", "degrees"), SHAPES)
def test_collectives(world_size: int, group_size: int, degrees: tuple[int, ...]) -> None:
    assert run_ranks(check_all, world_size, group_size, degrees) == world_size * [[]]


def bytes_by_name() -> dict[str, dict[str, Sent]]:
    """Bytes of each collective, over both axes of 2 groups of 2; 96 elements of fp32."""
    return {name: send_one_of_each(name) for name in ("native", PIPELINE, "flat")}


def send_one_of_each(name: str) -> dict[str, Sent]:
    topology = make_topology(world_size=4, group_size=2, degrees=())
    collectives, traffic = make(name, topology)
    sent, buffer = {}, torch.zeros(96)
    all_gather(collectives, buffer, topology.axes).wait()
    sent["all_gather"] = traffic.take()
    reduce_scatter(collectives, buffer, topology.axes, torch.bfloat16).wait()
    sent["reduce_scatter"] = traffic.take()
    all_reduce(collectives, buffer, topology.axes, torch.float32).wait()
    sent["all_reduce"] = traffic.take()
    with traffic.paused():
        all_gather(collectives, buffer, topology.axes).wait()
    sent["paused"] = traffic.take()
    collectives.close()
    return sent


@pytest.mark.ranks
def test_bytes_axis_by_axis() -> None:
    by_rank = run_ranks(bytes_by_name, 4)
    for sent in (found[name] for found in by_rank for name in ("native", PIPELINE)):
        # A shard between groups (96/4), then half of the whole inside them.
        assert sent["all_gather"] == Sent(intra=4 * 48, inter=4 * 24)
        assert sent["reduce_scatter"] == Sent(intra=2 * 48, inter=2 * 24)
        assert sent["all_reduce"] == Sent(intra=2 * 4 * 48, inter=2 * 4 * 24)
        assert sent["paused"] == Sent()
    # One flat ring crosses groups at their last ranks alone.
    intra, inter = Sent(intra=4 * 72), Sent(inter=4 * 72)
    assert [found["flat"]["all_gather"] for found in by_rank] == [intra, inter, intra, inter]
