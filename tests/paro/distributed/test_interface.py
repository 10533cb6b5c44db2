"""Gloo's interface on several nodes: the user's, NCCL's, or that of the way to another node."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist

from paro.distributed import interface
from paro.distributed.interface import VARIABLE, choose_interface, interface_text
from paro.distributed.world import World

# On rank 0's node the host's name, which is MASTER_ADDR, is a loopback address.
ADDRESSES = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "ib0": "fe80::1%ib0"}
SOURCES = {"node0": "127.0.1.1", "10.0.0.2": "10.0.0.1", "127.0.1.1": "127.0.0.1", "ib": "fe80::1"}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (VARIABLE, "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # set, so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(interface, "_source_towards", SOURCES.__getitem__)
    monkeypatch.setattr(interface.socket, "if_nameindex", lambda: [*enumerate(ADDRESSES, 1)])
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
    return interface.os.environ.get(VARIABLE)


@pytest.mark.parametrize(
    ("rank", "variables", "wanted"),
    [
        (1, {}, "eth0"),  # the first node takes the way to the second
        (2, {"MASTER_ADDR": "10.0.0.2"}, "eth0"),  # and others that to the first
        (2, {"MASTER_ADDR": "ib"}, "ib0"),
        (0, {"NCCL_SOCKET_IFNAME": "^docker0"}, "eth0"),  # no name of an interface
        (0, {"NCCL_SOCKET_IFNAME": "ib0"}, "ib0"),
        (0, {"NCCL_SOCKET_IFNAME": "ib0", VARIABLE: "lo"}, "lo"),
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
    assert f"set {VARIABLE} to an interface" in text


@pytest.mark.parametrize(
    ("given", "address"), [("ib0,eth0", "fe80::1, 10.0.0.1"), ("nic7", "no address")]
)
def test_an_error_names_the_address_of_a_given_interface(
    given: str, address: str, host: pytest.MonkeyPatch
) -> None:
    host.setenv(VARIABLE, given)
    assert f"gloo uses {address} (interface {given}): " in interface_text()
