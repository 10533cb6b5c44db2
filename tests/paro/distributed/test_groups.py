"""Groups for NCCL: every rank makes communicators of its own groups alone, with high priority."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paro.collectives import wire
from paro.collectives.native import NativeCollectives
from paro.distributed.comm_stream import make_comm_streams
from paro.distributed.groups import GroupConfig, make_groups
from paro.distributed.links import Links
from paro.sharding.buffers import ElasticBuffer, Tally
from paro.topology import Use, make_topology
from tests.helpers.refusals import refused


class Options:
    """Stands for torch's, which only builds with NCCL have."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)
        self.config = SimpleNamespace(max_ctas=None, cta_policy=None)


def lacking(setting: str) -> type[Options]:
    """Options of a torch that does not have a setting of NCCL."""

    class Lacking(Options):
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            super().__init__(is_high_priority_stream)
            delattr(self.config, setting)

    return Lacking


class FakeNccl:
    """Stands for torch's groups and memory pools under NCCL, and notes their calls in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **kind: Any) -> None:
        self.notes: list[tuple[Any, ...]] = []
        self.calls: list[dict[str, Any]] = []  # of new_group
        kind = {"Options": Options, "NCCL_CTA_POLICY_ZERO": 2, **kind}
        monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(**kind), raising=False)
        monkeypatch.setattr(dist, "new_group", self.new_group)
        monkeypatch.setattr(
            dist, "destroy_process_group", lambda group: self.notes.append(("destroy", group.ranks))
        )
        monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: ("pool", allocator))
        monkeypatch.setattr(torch.cuda, "use_mem_pool", self.use_mem_pool)
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
        properties = SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)

    @property
    def policies(self) -> dict[tuple[int, ...], int | None]:
        return {tuple(c["ranks"]): c["pg_options"].config.cta_policy for c in self.calls}

    def new_group(self, ranks: list[int], **named: Any) -> object:
        self.calls.append({"ranks": ranks, **named})
        backend = SimpleNamespace(
            mem_allocator="of NCCL",
            register_mem_pool=lambda pool, symm: self.notes.append(("register", ranks, pool, symm)),
            deregister_mem_pool=lambda pool: self.notes.append(("deregister", ranks, pool)),
        )
        return SimpleNamespace(ranks=ranks, _get_backend=lambda _device: backend)

    @contextmanager
    def use_mem_pool(self, pool: object) -> Iterator[None]:
        self.notes.append(("enter", pool))
        yield
        self.notes.append(("leave", pool))


TOPOLOGY = make_topology(world_size=4, group_size=2, degrees=(2, 2, 4))
INSIDE, BETWEEN = TOPOLOGY.axes_between(1, 2), TOPOLOGY.axes_between(2, 4)
CONFIG = GroupConfig(timeout=timedelta(seconds=7), backend="nccl", device=torch.device("cuda", 1))
COPYING = replace(CONFIG, copy_engine=True)


def made_by(
    monkeypatch: pytest.MonkeyPatch, rank: int, *, options: type[Options] = Options, **config: Any
) -> list[dict[str, Any]]:
    """The groups that a rank of 4 makes for an axis of 2, on a GPU of 132 multiprocessors."""
    nccl = FakeNccl(monkeypatch, Options=options)
    config = {"device": torch.device("cuda", rank), **config}
    make_groups(TOPOLOGY, rank, {Use.ROTATE: frozenset({INSIDE})}, replace(CONFIG, **config))
    return nccl.calls


def test_only_members_connect_at_once_and_with_the_priority_of_comm_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = made_by(monkeypatch, 3)
    assert [call["ranks"] for call in calls] == [[0, 1], [2, 3]]
    assert [call["device_id"] for call in calls] == [None, torch.device("cuda", 3)]
    options = [call["pg_options"] for call in calls]
    assert all(one.is_high_priority_stream for one in options)
    assert [one._timeout for one in options] == [timedelta(seconds=7)] * 2
    assert options[0] is not options[1]  # torch writes the group's name and ranks into them
    assert [call["pg_options"] for call in made_by(monkeypatch, 0, backend="gloo")] == [None, None]


@pytest.mark.parametrize(("launch_order", "max_ctas"), [("free", 22), ("implicit", None)])
def test_communicators_that_begin_in_any_order_fit_the_gpu_side_by_side(
    launch_order: str, max_ctas: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    calls = made_by(monkeypatch, 0, launch_order=launch_order)
    assert [call["pg_options"].config.max_ctas for call in calls] == [max_ctas] * 2
    assert (os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == "1") == (max_ctas is None)


def test_a_torch_that_bounds_no_thread_blocks_keeps_the_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {})
    make = partial(made_by, monkeypatch, 0, options=lacking("max_ctas"))
    refused(make, "--paro-nccl-launch-order implicit")
    assert len(make(launch_order="implicit")) == 2


def test_gathers_inside_a_group_fill_registered_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = FakeNccl(monkeypatch)
    groups = make_groups(TOPOLOGY, 1, {Use.GATHER: frozenset({INSIDE, BETWEEN})}, COPYING)
    assert nccl.policies == {(0, 1): 2, (2, 3): 2, (0, 2): None, (1, 3): None}
    pool = ("pool", "of NCCL")
    assert nccl.notes == [("register", [0, 1], pool, True)]
    streams = make_comm_streams(torch.device("cpu"), overlap=False, backend="gloo")
    collectives = NativeCollectives(groups, Links(streams))
    buffer = ElasticBuffer(
        8,
        dtype=torch.float32,
        device=torch.device("cpu"),
        tally=Tally(),
        memory=collectives.whole_memory,
    )
    buffer.alloc()
    assert nccl.notes[1:] == [("enter", pool), ("leave", pool)]

    # What is sent is registered too: it lies in the whole buffer.
    sent: list[Tensor] = []
    monkeypatch.setattr(wire, "_all_gather", lambda _whole, shard, group: sent.append(shard))
    shard = torch.full((2,), 5.0)
    collectives.all_gather(buffer.values, (*INSIDE, *BETWEEN), shard=shard).wait()
    assert sent[0].data_ptr() == shard.data_ptr()  # between groups
    assert sent[1].data_ptr() == buffer.values[4:].data_ptr()
    collectives.all_gather(buffer.values, INSIDE, shard=torch.full((4,), 7.0)).wait()
    assert sent[2].data_ptr() == buffer.values[4:].data_ptr()
    assert sent[2].tolist() == [7.0] * 4

    nccl.notes.clear()
    groups.close()
    assert [note[0] for note in nccl.notes] == ["deregister", "destroy", "destroy"]


def test_copy_engines_carry_gathers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = FakeNccl(monkeypatch)
    groups = make_groups(TOPOLOGY, 1, {Use.REDUCE: frozenset({INSIDE})}, COPYING)
    assert nccl.policies == {(0, 1): None, (2, 3): None}
    with groups.whole_memory():
        assert nccl.notes == []


@pytest.mark.parametrize(
    "lacks",
    [{"NCCL_CTA_POLICY_ZERO": None}, {"Options": lacking("cta_policy")}, {"version": (2, 27, 5)}],
    ids=["the policy's name", "the option", "the collectives"],
)
def test_copy_engines_are_refused_where_torch_or_nccl_lacks(
    lacks: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = lacks.pop("version", (2, 28, 9))
    FakeNccl(monkeypatch, **lacks)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    spans = {Use.GATHER: frozenset({INSIDE})}
    refused(
        lambda: make_groups(TOPOLOGY, 1, spans, COPYING),
        "--paro-nccl-copy-engine needs NCCL 2.28 ... leave the flag out",
    )
