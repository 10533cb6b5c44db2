"""Axes, peers and nested shards for every shape up to 8 x 8."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from paro.topology import Link, make_topology, nested_range

SHAPES = list(product(range(1, 9), repeat=2))


def test_usual_axes() -> None:
    topology = make_topology(world_size=6, group_size=3, degrees=(1, 3, 6))
    intra, inter = topology.axes
    assert (intra.inner, intra.outer, intra.link) == (1, 3, Link.INTRA)
    assert (inter.inner, inter.outer, inter.link) == (3, 6, Link.INTER)
    assert topology.members((intra,), 4) == (3, 4, 5)
    assert topology.members((inter,), 4) == (1, 4)
    assert topology.members((intra, inter), 4) == (0, 1, 2, 3, 4, 5)


def test_no_axis_has_size_one() -> None:
    assert make_topology(world_size=1, group_size=1, degrees=(1, 1, 1)).axes == ()
    assert len(make_topology(world_size=4, group_size=4, degrees=(1, 4, 4)).axes) == 1


@pytest.mark.parametrize(("groups", "group_size"), SHAPES)
def test_members_partition_the_world(groups: int, group_size: int) -> None:
    world = groups * group_size
    topology = make_topology(world_size=world, group_size=group_size, degrees=(1, world))
    for axis in topology.axes:
        found = {topology.members((axis,), rank) for rank in range(world)}
        assert sorted(rank for members in found for rank in members) == list(range(world))
        assert all(len(members) == axis.size for members in found)
        assert all(
            [axis.digit(rank) for rank in members] == list(range(axis.size)) for members in found
        )


@pytest.mark.parametrize(("groups", "group_size"), SHAPES)
def test_shards_tile_the_buffer_and_nest(groups: int, group_size: int) -> None:
    world = groups * group_size
    topology = make_topology(world_size=world, group_size=group_size, degrees=(world,))
    numel = world * 3
    degrees = sorted({1, group_size, world})
    for degree in degrees:
        starts = {topology.shard_start(rank, degree, numel) for rank in range(world)}
        assert sorted(starts) == list(range(0, numel, numel // degree))
    for rank in range(world):
        for coarse, fine in pairwise(degrees):
            outer = topology.shard_start(rank, coarse, numel)
            start, stop = nested_range(topology.axes_between(coarse, fine), rank, numel // coarse)
            assert stop - start == numel // fine
            assert topology.shard_start(rank, fine, numel) == outer + start
