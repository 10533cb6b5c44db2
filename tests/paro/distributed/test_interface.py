"""A rank's network interface, its GPU, and its recorder of collectives."""

from __future__ import annotations

import os
import pickle
import socket
import warnings
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as recorders
from torch.distributed import distributed_c10d

from paro.distributed import flight_recorder, process_group
from paro.distributed.flight_recorder import record_flights, recorded_collectives
from paro.distributed.process_group import (
    IFNAME,
    _runs,
    check_gpu,
    choose_interface,
    interface_text,
)
from paro.distributed.world import World
from tests.helpers.refusals import refused

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
def test_gloo_chooses_on_one_node_and_without_a_way(
    host: pytest.MonkeyPatch, given: dict[str, object]
) -> None:
    assert chosen(**given) is None  # type: ignore[arg-type]
    text = interface_text()
    assert f"gloo uses 127.0.1.1 (host name {socket.gethostname()}): " in text
    assert f"set {IFNAME} to an interface" in text


@pytest.mark.parametrize(
    ("given", "address"), [("ib0,eth0", "fe80::1, 10.0.0.1"), ("nic7", "no address")]
)
def test_an_error_names_the_address_of_a_given_interface(
    given: str, address: str, host: pytest.MonkeyPatch
) -> None:
    host.setenv(IFNAME, given)
    assert f"gloo uses {address} (interface {given}): " in interface_text()


TOO_OLD = "CUDA initialization: The NVIDIA driver on your system is too old (found version 12020)"


@pytest.fixture
def v100s(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Four of them, for which this torch has kernels."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "V100")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_70", "sm_80", "sm_90a"])
    return monkeypatch


def test_a_rank_has_the_gpu_of_its_number(v100s: pytest.MonkeyPatch) -> None:
    v100s.setenv("PYTORCH_ALLOC_CONF", "")  # set, so that it is restored
    v100s.delenv("PYTORCH_ALLOC_CONF")
    v100s.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    assert check_gpu(3) == torch.device("cuda:3")
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
    refused(lambda: check_gpu(4), "local rank 4 has no GPU: torch sees 4")
    v100s.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "compute_120"])
    told = "has no kernels for V100, of compute capability 7.0: it was built for sm_75, sm_80"
    refused(lambda: check_gpu(0), told)


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_80", (8, 6), True),
        ("sm_86", (8, 0), False),
        ("sm_90", (10, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_100a", (10, 3), False),
        ("compute_90", (10, 0), True),
        ("compute_120", (10, 0), False),
        ("gfx942", (9, 4), False),
    ],
)
def test_which_code_runs_where(arch: str, capability: tuple[int, int], *, runs: bool) -> None:
    assert _runs(arch, capability) == runs


@pytest.mark.parametrize(
    ("cuda", "warned", "told"),
    [
        ("13.0", TOO_OLD, "too old (found version 12020) ... CUDA 13.0, 580 or newer"),
        ("12.8", None, "a driver for CUDA 12.8, 525 or newer, and CUDA_VISIBLE_DEVICES may hide"),
        ("14.0", None, "a driver for CUDA 14.0, and CUDA_VISIBLE_DEVICES"),
        (None, None, "is built without CUDA; give --distributed-backend gloo"),
    ],
)
def test_why_torch_sees_none(
    cuda: str | None, warned: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_available() -> bool:
        if warned is not None:
            warnings.warn(f"{warned}\nPlease update it.", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    refused(lambda: check_gpu(0), told)


@pytest.mark.parametrize(
    ("backends", "read"), [(("gloo", "nccl"), "NCCL's"), (("gloo", "gloo"), "others")]
)
def test_nccl_s_recorder_is_read_where_any_group_is_nccl_s(
    monkeypatch: pytest.MonkeyPatch, backends: tuple[str, ...], read: str
) -> None:
    """The default group is gloo's under every backend."""

    def dump(name: str) -> bytes:
        return pickle.dumps({"entries": [], "recorder": name})

    groups = {object(): (backend, None) for backend in backends}
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(type(distributed_c10d._world), "pg_map", property(lambda _: groups))
    monkeypatch.setattr(recorders, "_dump_nccl_trace", lambda: dump("NCCL's"), raising=False)
    monkeypatch.setattr(recorders, "_dump_fr_trace", lambda: dump("others"))
    monkeypatch.setattr(flight_recorder, "read_world", lambda: World(local_rank=3))
    devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    recorded = recorded_collectives()
    assert devices == ([3] if "nccl" in backends else [])
    assert recorded is not None
    assert pickle.loads(recorded)["recorder"] == read


def test_ranks_with_one_number_in_their_groups_write_different_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = set()
    for rank in (0, 8):
        for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv("TORCH_NCCL_DUMP_ON_TIMEOUT", raising=False)
        record_flights(str(tmp_path), rank)
        written.add(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}0")  # as torch does for both
    assert len(written) == 2
    assert not any(Path(name).name.startswith("rank_") for name in written)
