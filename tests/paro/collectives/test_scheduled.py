"""The executor runs schedules and shifts in chunks, bitwise reproducibly, with little memory."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paro.collectives import schedule
from paro.collectives.hops import ALGORITHMS
from paro.collectives.schedule import MESSAGES_UNDER_WAY
from paro.collectives.scheduled import MessageBuffers
from paro.collectives.shifts import Ring, ShiftDirection
from paro.collectives.wire import Pending, Wire
from paro.distributed.groups import make_groups, make_resources
from paro.distributed.process_group import RuntimeConfig
from paro.layout import chunk_numel
from paro.topology import Sent, StreamKind, make_topology, nested_range
from tests.helpers.ranks import run_ranks
from tests.helpers.requests import all_gather, all_reduce, reduce_scatter
from tests.paro.collectives.test_collectives import make


def noise(rank: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def run_in_chunks(name: str, group_size: int, numel: int, overlap: bool) -> dict[str, Tensor]:
    """Every collective on random numbers, with shards cut into chunks of a few elements."""
    rank, size = dist.get_rank(), dist.get_world_size()
    topology = make_topology(world_size=size, group_size=group_size, degrees=())
    results: dict[str, Tensor] = {}
    with (
        mock.patch.object(schedule, "_CHUNK_BYTES", 28),
        mock.patch.object(schedule, "_LEAST_CHUNK_BYTES", 4),
    ):
        collectives, traffic = make(name, topology, overlap=overlap)
        own = slice(*nested_range(topology.axes, rank, numel))
        everybody = torch.stack([noise(r, numel) for r in range(size)])
        gathered = torch.zeros(numel)
        gathered[own] = everybody[0][own]
        event = all_gather(collectives, gathered, topology.axes)
        for comm_dtype in (torch.float32, torch.bfloat16):
            results[f"scattered {comm_dtype}"] = everybody[rank].clone()
            reduce_scatter(
                collectives, results[f"scattered {comm_dtype}"], topology.axes, comm_dtype
            )
            results[f"reduced {comm_dtype}"] = everybody[rank].clone()
            last = all_reduce(
                collectives, results[f"reduced {comm_dtype}"], topology.axes, comm_dtype
            )
        event.wait()
        last.wait()
        gathered = gathered.clone()  # as it is now, not once the threads have ended
        results = {label: result.clone() for label, result in results.items()}
        collectives.close()
    assert torch.equal(gathered, everybody[0])
    total = everybody.double().sum(0)
    for label, result in results.items():
        part = own if "scattered" in label else slice(None)
        accuracy = 1e-5 if "float32" in label else 0.1
        torch.testing.assert_close(result[part].double(), total[part], rtol=accuracy, atol=accuracy)
        results[label] = result[part].clone()
    assert traffic.take() != Sent()
    return results


def run_twice_and_inline(group_sizes: Sequence[int], numel: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for size, name in product(group_sizes, ALGORITHMS):
        threads, again, inline = (
            run_in_chunks(name, size, numel, overlap) for overlap in (True, True, False)
        )
        for label, result in threads.items():
            assert torch.equal(result, again[label]), f"{name}, groups of {size}: {label}"
            assert torch.equal(result, inline[label]), f"{name}, groups of {size}: {label}"
            found[f"{name}, groups of {size}: {label}"] = result
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world_size", "group_sizes"),
    [(4, [2, 4]), *(pytest.param(2 * n, [n], marks=pytest.mark.verify) for n in (3, 4))],
)
def test_chunks_of_random_numbers(world_size: int, group_sizes: list[int]) -> None:
    first, *others = run_ranks(run_twice_and_inline, world_size, group_sizes, 31 * world_size)
    reduced = [label for label in first if "reduced" in label]
    assert len(reduced) == 2 * len(ALGORITHMS) * len(group_sizes)
    for label in reduced:
        assert all(torch.equal(other[label], first[label]) for other in others), label


def measure_room(name: str, numel: int) -> tuple[int, Sent]:
    """The most bytes in addition to the buffer during a reduction, and the bytes sent."""
    topology = make_topology(world_size=dist.get_world_size(), group_size=4, degrees=())
    collectives, traffic = make(name, topology)
    lock, alive, peak = threading.Lock(), 0, 0

    def count(num_bytes: int) -> None:
        nonlocal alive, peak
        with lock:
            alive += num_bytes
            peak = max(peak, alive)

    send, slot = Wire.send, MessageBuffers.slot

    def counted_send(self: Wire, tensor: Tensor, peer: int, tag: int) -> Pending:
        count(tensor.nbytes)
        weakref.finalize(tensor, count, -tensor.nbytes)
        return send(self, tensor, peer, tag)

    def counted_slot(
        self: MessageBuffers, number: int, numel: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        if number not in self._slots:
            count(numel * dtype.itemsize)
        return slot(self, number, numel, dtype, device)

    buffer = torch.ones(numel)
    with (
        mock.patch.object(Wire, "send", counted_send),
        mock.patch.object(MessageBuffers, "slot", counted_slot),
    ):
        all_reduce(collectives, buffer, topology.axes, torch.bfloat16).wait()
    collectives.close()
    assert torch.equal(buffer, torch.full((numel,), float(dist.get_world_size())))
    return peak, traffic.take()


@pytest.mark.ranks
def test_no_buffer_of_the_whole_size_is_added() -> None:
    numel = 8 * (1 << 21)  # shards of 4 MiB in bf16, in four chunks
    for peak, sent in run_ranks(measure_room, 8, "ho-ring", numel):
        chunk = (4 << 20) * 4 // 11  # the longest
        landings, copies = MESSAGES_UNDER_WAY, 2 * MESSAGES_UNDER_WAY + 1  # of each of two levels
        assert 0 < peak <= 2 * (landings + copies) * (chunk + 2)
        assert peak < 4 * numel / 2  # of the buffer's bytes
        assert sent == Sent(intra=2 * 2 * numel * 3 // 4, inter=2 * 2 * numel // 4 // 2)


def wait_for_a_silent_peer() -> str:
    topology = make_topology(world_size=4, group_size=2, degrees=())
    with mock.patch.object(RuntimeConfig, "timeout", timedelta(seconds=1.0)):
        collectives, _ = make("ho-ring", topology)
    if dist.get_rank() == 3:
        time.sleep(1.5)
        return ""
    try:
        all_gather(collectives, torch.zeros(1024), topology.axes).wait()
    except RuntimeError as error:
        return f"{error} because {error.__cause__}"
    return "no error"


@pytest.mark.ranks
def test_a_silent_peer_is_named() -> None:
    *message, _ = run_ranks(wait_for_a_silent_peer, 4)
    for rank, link in ((1, "inter"), (2, "intra")):
        assert f"from rank 3 over {link}-group links failed" in message[rank]
    assert all("failed" in text for text in message)


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

    def shift(self, direction: ShiftDirection) -> None:
        if self._in_place:
            self._ring.shift_in_place(self.values, self._other, direction).wait()
        else:
            self._ring.shift(self.values, self._other, direction).wait()
            self.values, self._other = self._other, self.values


def rotate(degree: int, *, in_place: bool, overlap: bool) -> tuple[list[str], Sent]:
    """The shifts of a forward and a backward; returns the values that are wrong."""
    rank, size = dist.get_rank(), dist.get_world_size()
    topology = make_topology(world_size=size, group_size=degree, degrees=(degree,))
    config = RuntimeConfig(distributed_backend="gloo")
    resources = make_resources(torch.device("cpu"), "gloo", overlap=overlap)
    span = topology.axes_between(1, degree)
    groups = make_groups(topology, rank, {StreamKind.ROTATE: frozenset({span})}, config, resources)
    ring = Ring(groups, StreamKind.ROTATE, span)
    group, wrong = rank // degree, []
    weights = Traveller(ring, slice_of(ring.position, group), in_place=in_place)
    for step in range(degree):
        if step:
            weights.shift(ShiftDirection.CLOCKWISE)
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
            weights.shift(ShiftDirection.COUNTER_CLOCKWISE)
            gradient.shift(ShiftDirection.COUNTER_CLOCKWISE)
    total = slice_of(ring.position, group) * (degree * (degree + 1) // 2)
    if not torch.equal(gradient.values, total):
        wrong.append("a gradient came home without every rank's part")
    resources.streams.close()
    groups.close()
    return wrong, resources.traffic.take()


def rotate_all_ways() -> None:
    for degree in DEGREES[dist.get_world_size()]:
        for in_place, overlap in product((False, True), repeat=2):
            wrong, sent = rotate(degree, in_place=in_place, overlap=overlap)
            label = f"degree {degree}, {in_place=}, {overlap=}"
            assert not wrong, label
            assert sent == Sent(intra=3 * (degree - 1) * NUMEL * 4, inter=0), label


@pytest.mark.ranks
@pytest.mark.parametrize(
    "world_size", [4, *(pytest.param(n, marks=pytest.mark.verify) for n in (2, 3, 6, 8))]
)
def test_slices_travel_round_and_gradients_come_home(world_size: int) -> None:
    run_ranks(rotate_all_ways, world_size)
