"""Groups for NCCL; a rank's network interface, its GPU, and its recorder of collectives."""

from __future__ import annotations

import os
import pickle
import socket
import warnings
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as recorders
from torch.distributed import distributed_c10d

from paro.collectives import wire
from paro.collectives.native import NativeCollectives
from paro.distributed import flight_recorder, process_group
from paro.distributed.comm_stream import InlineStreams
from paro.distributed.control import Control
from paro.distributed.flight_recorder import record_flights, recorded_collectives
from paro.distributed.groups import CommResources, make_groups
from paro.distributed.process_group import (
    IFNAME,
    RuntimeConfig,
    check_gpu,
    choose_interface,
    device_for,
    interface_text,
)
from paro.distributed.world import World
from paro.errors import RunError
from paro.sharding.buffers import BufferTally, ElasticBuffer
from paro.topology import StreamKind, make_topology
from tests.helpers.fake_nccl import FakeNccl, Options, lacking
from tests.helpers.refusals import refused
from tests.helpers.requests import all_gather

TOPOLOGY = make_topology(world_size=4, group_size=2, degrees=(2, 2, 4))
INSIDE, BETWEEN = TOPOLOGY.axes_between(1, 2), TOPOLOGY.axes_between(2, 4)
CONFIG = RuntimeConfig(distributed_timeout_minutes=7)
COPYING = replace(CONFIG, paro_nccl_copy_engine=True)
CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)
RESOURCES = CommResources(InlineStreams())
ALONE = Control(World(), CPU)
copying_groups = partial(make_groups, TOPOLOGY, 1, config=COPYING, resources=RESOURCES, device=GPU)


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
    make_groups(TOPOLOGY, rank, spans, replace(CONFIG, **config), RESOURCES, **where)  # type: ignore[arg-type]
    return nccl.calls


def test_only_members_connect_at_once_and_with_priority(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_more_thread_blocks_than_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for communicators, environment, message in (
        (133, {}, "133 communicators ... at least 1 of the 132 ... --paro-nccl-launch-order"),
        (4, {"NCCL_MIN_NCHANNELS": "33"}, "33 (NCCL_MIN_NCHANNELS) ... unset NCCL_MIN_NCHANNELS"),
        (5, {"NCCL_MAX_CTAS": "17"}, "17 (NCCL_MAX_CTAS) ..."),  # 32 for messages
    ):
        monkeypatch.setattr(os, "environ", environment)
        refused(partial(made_by, monkeypatch, 0, communicators=communicators), message)
        assert made_by(
            monkeypatch, 0, communicators=communicators, paro_nccl_launch_order="implicit"
        )
        fewer = dict.fromkeys(environment, "16")
        monkeypatch.setattr(os, "environ", fewer)
        assert made_by(monkeypatch, 0, communicators=min(8, communicators))
    # A torch without max_ctas keeps the order.
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
    return ElasticBuffer(numel, dtype=torch.float32, device=CPU, tally=BufferTally(), resize=resize)


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
    """Nor one whose groups gather nothing: copy engines carry gathers alone."""
    nccl = FakeNccl(monkeypatch)
    groups = copying_groups({StreamKind.REDUCE: frozenset({INSIDE})})
    assert nccl.policies == {(0, 1): None, (2, 3): None}
    groups.registered.reserve({True: (64, 2)}, ALONE)
    assert nccl.notes == []
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


def test_what_copy_engines_need(monkeypatch: pytest.MonkeyPatch) -> None:
    lacks: dict[str, Any]
    for lacks, version in (
        ({"NCCL_CTA_POLICY_ZERO": None}, (2, 28, 9)),
        ({"Options": lacking("cta_policy")}, (2, 28, 9)),
        ({}, (2, 27, 5)),
    ):
        with monkeypatch.context() as patch:
            FakeNccl(patch, **lacks)
            patch.setattr(torch.cuda.nccl, "version", lambda version=version: version)
            make = partial(copying_groups, {StreamKind.GATHER: frozenset({INSIDE})})
            refused(make, "--paro-nccl-copy-engine needs NCCL 2.28 ... leave the flag out")


# On rank 0's node the host's name, which is MASTER_ADDR, is a loopback address.
ADDRESSES = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "ib0": "fe80::1%ib0"}
SOURCES = {"node0": "127.0.1.1", "10.0.0.2": "10.0.0.1", "127.0.1.1": "127.0.0.1", "ib": "fe80::1"}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (IFNAME, "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # set, so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(process_group, "_source_towards", SOURCES.__getitem__)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [*enumerate(ADDRESSES, 1)])
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", ("127.0.1.1", 0))])
    hardware = SimpleNamespace(family=psutil.AF_LINK, address="02:fc:00:00:00:01")
    found = {
        name: [SimpleNamespace(family=socket.AF_INET, address=each), hardware]
        for name, each in ADDRESSES.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    return monkeypatch


def chosen(rank: int = 0, *, of_peer: str = "10.0.0.2", per_node: int = 2) -> str | None:
    store = dist.HashStore()
    store.set("address/2", of_peer)
    choose_interface(store, World(rank=rank, size=4, ranks_per_node=per_node))
    assert per_node == 4 or store.check([f"address/{rank}"])
    return os.environ.get(IFNAME)


@pytest.mark.parametrize(
    ("rank", "variables", "wanted"),
    [
        (1, {}, "eth0"),  # the first node takes the way to the second
        (2, {"MASTER_ADDR": "10.0.0.2"}, "eth0"),  # and others that to the first
        (2, {"MASTER_ADDR": "ib"}, "ib0"),
        (0, {"NCCL_SOCKET_IFNAME": "^docker0"}, "eth0"),  # no name of an interface
        (0, {"NCCL_SOCKET_IFNAME": "ib0"}, "ib0"),
        (0, {"NCCL_SOCKET_IFNAME": "ib0", IFNAME: "lo"}, "lo"),
    ],
)
def test_variables_win_over_the_way_to_another_node(
    host: pytest.MonkeyPatch, rank: int, variables: dict[str, str], wanted: str
) -> None:
    for name, value in variables.items():
        host.setenv(name, value)
    assert chosen(rank=rank) == wanted
    assert f"(interface {wanted}): " in interface_text()


@pytest.mark.parametrize("given", [{"per_node": 4}, {"of_peer": "127.0.1.1"}])
def test_gloo_chooses_on_one_node(host: pytest.MonkeyPatch, given: dict[str, object]) -> None:
    assert chosen(**given) is None  # type: ignore[arg-type]
    text = interface_text()
    assert f"gloo uses 127.0.1.1 (host name {socket.gethostname()}): " in text
    assert f"set {IFNAME} to an interface" in text


TOO_OLD = "CUDA initialization: The NVIDIA driver on your system is too old (found version 12020)"


def test_a_rank_has_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "is_available": True,
        "device_count": 4,
        "get_device_capability": (7, 0),
        "get_device_name": "V100",
        "get_arch_list": ["sm_70", "sm_80", "sm_90a"],
    }.items():
        monkeypatch.setattr(torch.cuda, name, Mock(return_value=value))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # set, so that it is restored
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    assert check_gpu(3) == torch.device("cuda:3")
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
    refused(lambda: check_gpu(4), "local rank 4 has no GPU: torch sees 4")
    arches = ["sm_75", "sm_80", "compute_120"]
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: arches)
    message = "has no kernels for V100, of compute capability 7.0: it was built for sm_75, sm_80"
    refused(lambda: check_gpu(0), message)


@pytest.mark.parametrize(
    ("cuda", "warned", "message"),
    [
        ("13.0", TOO_OLD, "too old (found version 12020) ... CUDA 13.0, 580 or newer"),
        ("12.8", None, "a driver for CUDA 12.8, 525 or newer, and CUDA_VISIBLE_DEVICES may hide"),
        ("14.0", None, "a driver for CUDA 14.0, and CUDA_VISIBLE_DEVICES"),
        (None, None, "is built without CUDA; give --distributed-backend gloo"),
    ],
)
def test_why_torch_sees_none(
    cuda: str | None, warned: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_available() -> bool:
        if warned is not None:
            warnings.warn(f"{warned}\nPlease update it.", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    refused(lambda: device_for(RuntimeConfig(), World()), message)
    assert device_for(RuntimeConfig(distributed_backend="gloo"), World()) == CPU


@pytest.mark.parametrize("backends", [("gloo", "nccl"), ("gloo", "gloo")])
def test_nccl_s_recorder_is_read_where_any_group_is_nccl_s(
    monkeypatch: pytest.MonkeyPatch, backends: tuple[str, ...]
) -> None:
    """The default group is gloo's under every backend."""
    groups = {object(): (backend, None) for backend in backends}
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(type(distributed_c10d._world), "pg_map", property(lambda _: groups))
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):
        message = pickle.dumps({"entries": [], "recorder": name})
        monkeypatch.setattr(recorders, name, lambda message=message: message, raising=False)
    monkeypatch.setattr(flight_recorder, "read_world", lambda: World(local_rank=3))
    devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    recorder = pickle.loads(recorded_collectives() or b"")["recorder"]
    nccl = (recorder, devices) == ("_dump_nccl_trace", [3])
    assert nccl == ("nccl" in backends)
    assert nccl or (recorder, devices) == ("_dump_fr_trace", [])


def test_files_of_ranks_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = set()
    for rank in (0, 8):
        for name in ("FR_BUFFER_SIZE", "FR_DUMP_TEMP_FILE", "NCCL_DUMP_ON_TIMEOUT"):
            monkeypatch.delenv(f"TORCH_{name}", raising=False)
        record_flights(str(tmp_path), rank)
        written.add(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}0")  # as torch does for both
    assert len(written) == 2
    assert not any(Path(name).name.startswith("rank_") for name in written)
