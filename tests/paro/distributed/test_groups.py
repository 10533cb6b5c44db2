"""Groups for NCCL: every rank makes communicators of its own groups alone, with high priority."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from paro.collectives import wire
from paro.collectives.native import NativeCollectives
from paro.distributed.comm_stream import InlineStreams
from paro.distributed.control import Control
from paro.distributed.groups import Links, make_groups
from paro.distributed.process_group import RuntimeConfig
from paro.distributed.world import World
from paro.errors import RunError
from paro.sharding.buffers import ElasticBuffer, Tally
from paro.topology import StreamKind, make_topology
from tests.helpers.fake_nccl import FakeNccl, Options, lacking
from tests.helpers.refusals import refused
from tests.helpers.requests import all_gather

TOPOLOGY = make_topology(world_size=4, group_size=2, degrees=(2, 2, 4))
INSIDE, BETWEEN = TOPOLOGY.axes_between(1, 2), TOPOLOGY.axes_between(2, 4)
CONFIG = RuntimeConfig(distributed_timeout_minutes=7)
COPYING = replace(CONFIG, paro_nccl_copy_engine=True)
CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)
LINKS = Links(InlineStreams())
ALONE = Control(World(), CPU)
copying_groups = partial(make_groups, TOPOLOGY, 1, config=COPYING, links=LINKS, device=GPU)


def made_by(
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    *,
    options: type[Options] = Options,
    communicators: int = 0,
    **config: Any,
) -> list[dict[str, Any]]:
    """The groups that a rank of 4 makes for an axis of 2, on a GPU of 132 multiprocessors."""
    nccl = FakeNccl(monkeypatch, Options=options)
    spans = {StreamKind.ROTATE: frozenset({INSIDE})}
    where = {"device": torch.device("cuda", rank), "communicators": communicators}
    make_groups(TOPOLOGY, rank, spans, replace(CONFIG, **config), LINKS, **where)  # type: ignore[arg-type]
    return nccl.calls


def test_only_members_connect_at_once_and_with_the_priority_of_comm_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = made_by(monkeypatch, 3)
    assert [call["ranks"] for call in calls] == [[0, 1], [2, 3]]
    assert [call["device_id"] for call in calls] == [None, torch.device("cuda", 3)]
    options = [call["pg_options"] for call in calls]
    assert all(one.is_high_priority_stream for one in options)
    assert [one._timeout for one in options] == [timedelta(minutes=7)] * 2
    assert options[0] is not options[1]  # torch writes the group's name and ranks into them
    by_gloo = made_by(monkeypatch, 0, distributed_backend="gloo")
    assert [call["pg_options"] for call in by_gloo] == [None, None]


@pytest.mark.parametrize(("launch_order", "max_ctas"), [("free", 8), ("implicit", None)])
def test_communicators_that_begin_in_any_order_have_few_thread_blocks(
    launch_order: str, max_ctas: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    calls = made_by(monkeypatch, 0, paro_nccl_launch_order=launch_order, communicators=9)
    assert [call["pg_options"].config.max_ctas for call in calls] == [max_ctas] * 2
    assert (os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == "1") == (max_ctas is None)


@pytest.mark.parametrize(
    ("communicators", "environment", "told"),
    [
        (133, {}, "133 communicators ... at least 1 of the 132 ... --paro-nccl-launch-order"),
        (4, {"NCCL_MIN_NCHANNELS": "33"}, "33 (NCCL_MIN_NCHANNELS) ... unset NCCL_MIN_NCHANNELS"),
        (5, {"NCCL_MAX_CTAS": "17"}, "17 (NCCL_MAX_CTAS) ..."),  # 32 for messages
    ],
)
def test_more_thread_blocks_than_fit_are_refused(
    communicators: int,
    environment: dict[str, str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", environment)
    refused(partial(made_by, monkeypatch, 0, communicators=communicators), told)
    assert made_by(monkeypatch, 0, communicators=communicators, paro_nccl_launch_order="implicit")
    fewer = dict.fromkeys(environment, "16")
    monkeypatch.setattr(os, "environ", fewer)
    assert made_by(monkeypatch, 0, communicators=min(8, communicators))


def test_a_torch_that_bounds_no_thread_blocks_keeps_the_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {})
    make = partial(made_by, monkeypatch, 0, options=lacking("max_ctas"))
    refused(make, "--paro-nccl-launch-order implicit")
    assert len(make(paro_nccl_launch_order="implicit")) == 2


def copying(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeNccl, NativeCollectives]:
    """Collectives that gather inside groups by copy engines, and between them."""
    nccl = FakeNccl(monkeypatch)
    spans = {StreamKind.GATHER: frozenset({INSIDE, BETWEEN})}
    return nccl, NativeCollectives(copying_groups(spans))


def whole(collectives: NativeCollectives, numel: int, *, trains: bool = True) -> ElasticBuffer:
    resize = partial(collectives.groups.registered.resize, trains=trains)
    return ElasticBuffer(numel, dtype=torch.float32, device=CPU, tally=Tally(), resize=resize)


def test_all_memory_is_there_before_it_is_registered_and_does_not_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nccl, collectives = copying(monkeypatch)
    assert nccl.policies == {(0, 1): 2, (2, 3): 2, (0, 2): None, (1, 3): None}
    collectives.groups.registered.reserve({True: (64, 2), False: (32, 1)}, ALONE)
    order = [(note[0], note[2] if note[0] == "segment" else note[1]) for note in nccl.notes]
    assert order == [("segment", 64)] * 2 + [("segment", 32)] + [("register", [0, 1])] * 3
    pools = [note[1] for note in nccl.notes if note[0] == "segment"]
    assert [note[2:] for note in nccl.notes if note[0] == "register"] == [(p, True) for p in pools]

    nccl.notes.clear()
    sizes = (16, True), (8, True), (8, False), (12, True)
    first, second, frozen, third = (whole(collectives, n, trains=trains) for n, trains in sizes)
    for buffer in (first, second, frozen):
        buffer.alloc()
    with pytest.raises(AssertionError, match="more parameters are whole"):
        third.alloc()
    second.free()
    third.alloc()  # takes its place
    assert third.values.untyped_storage().data_ptr() in pools[1].segments
    assert nccl.notes == []
    third.free()
    with pytest.raises(AssertionError, match="68 bytes are more"):
        whole(collectives, 17).alloc()

    collectives.close()
    undone = [note[0] for note in nccl.notes]
    assert undone == ["deregister"] * 3 + ["destroy"] * 2


def test_a_rank_without_memory_registers_none(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl, collectives = copying(monkeypatch)
    nccl.room = 100
    with pytest.raises(RunError):
        collectives.groups.registered.reserve({True: (64, 2)}, ALONE)
    assert [note[0] for note in nccl.notes] == ["segment"]


def test_gathers_inside_a_group_send_registered_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    _, collectives = copying(monkeypatch)
    collectives.groups.registered.reserve({True: (32, 1)}, ALONE)
    buffer = whole(collectives, 8)
    buffer.alloc()
    sent: list[Tensor] = []
    monkeypatch.setattr(wire, "_all_gather", lambda _whole, shard, group: sent.append(shard))
    shard = torch.full((2,), 5.0)
    all_gather(collectives, buffer.values, (*INSIDE, *BETWEEN), shard=shard).wait()
    assert sent[0].data_ptr() == shard.data_ptr()  # between groups
    assert sent[1].data_ptr() == buffer.values[4:].data_ptr()
    all_gather(collectives, buffer.values, INSIDE, shard=torch.full((4,), 7.0)).wait()
    assert sent[2].data_ptr() == buffer.values[4:].data_ptr()
    assert sent[2].tolist() == [7.0] * 4


def test_copy_engines_carry_gathers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = FakeNccl(monkeypatch)
    groups = copying_groups({StreamKind.REDUCE: frozenset({INSIDE})})
    assert nccl.policies == {(0, 1): None, (2, 3): None}
    groups.registered.reserve({True: (64, 2)}, ALONE)
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
    spans = {StreamKind.GATHER: frozenset({INSIDE})}
    refused(
        lambda: copying_groups(spans),
        "--paro-nccl-copy-engine needs NCCL 2.28 ... leave the flag out",
    )
