"""The ring: slices after every shift, gradients that move along, and bytes."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paro.collectives.shifts import Ring, Turn
from paro.distributed.groups import make_groups, make_links
from paro.distributed.process_group import RuntimeConfig
from paro.layout import chunk_numel
from paro.topology import Sent, StreamKind, make_topology
from tests.helpers.ranks import run_ranks

NUMEL = 1003  # several chunks, the last one shorter
DEGREES = {2: (2,), 3: (3,), 4: (4, 2), 6: (3,), 8: (8,)}  # by world size


def slice_of(position: int, group: int) -> Tensor:
    return torch.arange(NUMEL, dtype=torch.float32) + 10_000 * position + 100_000 * group


class Traveller:
    """A buffer that shifts in place, or between two."""

    def __init__(self, ring: Ring, values: Tensor, *, in_place: bool) -> None:
        self._ring = ring
        self._in_place = in_place
        self.values = values.clone()
        size = 2 * chunk_numel(NUMEL, values.itemsize, device_type="cpu") if in_place else NUMEL
        self._other = torch.full((size,), -1.0)

    def shift(self, turn: Turn) -> None:
        if self._in_place:
            self._ring.shift_in_place(self.values, self._other, turn).wait()
        else:
            self._ring.shift(self.values, self._other, turn).wait()
            self.values, self._other = self._other, self.values


def rotate(degree: int, *, in_place: bool, overlap: bool) -> tuple[list[str], Sent]:
    """The shifts of a forward and a backward; returns the values that are wrong."""
    rank, size = dist.get_rank(), dist.get_world_size()
    topology = make_topology(world_size=size, group_size=degree, degrees=(degree,))
    config = RuntimeConfig(distributed_backend="gloo")
    links = make_links(torch.device("cpu"), "gloo", overlap=overlap)
    span = topology.axes_between(1, degree)
    groups = make_groups(topology, rank, {StreamKind.ROTATE: frozenset({span})}, config, links)
    ring = Ring(groups, StreamKind.ROTATE, span)
    group, wrong = rank // degree, []
    weights = Traveller(ring, slice_of(ring.position, group), in_place=in_place)
    for step in range(degree):
        if step:
            weights.shift(Turn.CLOCKWISE)
        if not torch.equal(weights.values, slice_of((ring.position - step) % degree, group)):
            wrong.append(f"forward, step {step}")
        assert ring.owner_of(step) == (ring.position - step) % degree
    # In reverse; every rank adds its contribution to the slice it holds.
    gradient = Traveller(ring, torch.zeros(NUMEL), in_place=in_place)
    for step in reversed(range(degree)):
        if not torch.equal(weights.values, slice_of(ring.owner_of(step), group)):
            wrong.append(f"backward, step {step}")
        gradient.values += weights.values * (1 + ring.position)
        if step:
            weights.shift(Turn.COUNTER_CLOCKWISE)
            gradient.shift(Turn.COUNTER_CLOCKWISE)
    total = slice_of(ring.position, group) * (degree * (degree + 1) // 2)
    if not torch.equal(gradient.values, total):
        wrong.append("a gradient came home without every rank's part")
    links.streams.close()
    groups.close()
    return wrong, links.traffic.take()


def rotate_all_ways() -> None:
    for degree in DEGREES[dist.get_world_size()]:
        for in_place, overlap in product((False, True), repeat=2):
            wrong, sent = rotate(degree, in_place=in_place, overlap=overlap)
            label = f"degree {degree}, {in_place=}, {overlap=}"
            assert not wrong, label
            assert sent == Sent(intra=3 * (degree - 1) * NUMEL * 4, inter=0), label


@pytest.mark.ranks
@pytest.mark.parametrize(
    "world_size", [2, 4, *(pytest.param(n, marks=pytest.mark.verify) for n in (3, 6, 8))]
)
def test_slices_travel_round_and_gradients_come_home(world_size: int) -> None:
    run_ranks(rotate_all_ways, world_size)
