"""Chooses the network interface of gloo, which would take the interface of the host's name."""

# The host's name is often a loopback address: 127.0.1.1 in /etc/hosts of Debian and Ubuntu, or
# 127.0.0.1 in a container with the host's network. Ranks of other nodes then connect to themselves.

from __future__ import annotations

import ipaddress
import os
import socket

import torch.distributed as dist

from paro.distributed.world import World, read_address

VARIABLE = "GLOO_SOCKET_IFNAME"


def choose_interface(store: dist.Store, world: World) -> None:
    """Set gloo's variable, if it is unset and several nodes train; all ranks call it.

    The value is the interface in NCCL's variable, else the interface towards MASTER_ADDR. Where
    that is the loopback, as on rank 0's node, it is the interface towards the next node. If there
    is no such interface, gloo chooses.
    """
    if world.size <= world.ranks_per_node:
        return
    own = _source_towards(read_address()[0])
    store.set(f"address/{world.rank}", own)
    if os.environ.get(VARIABLE):
        return
    of_nccl, names = os.environ.get("NCCL_SOCKET_IFNAME", ""), dict(socket.if_nameindex()).values()
    if of_nccl in names:
        os.environ[VARIABLE] = of_nccl
        return
    if _is_loopback(own) and world.rank < world.ranks_per_node:
        own = _source_towards(store.get(f"address/{world.ranks_per_node}").decode())
    reaching = [] if _is_loopback(own) else [name for name in names if own in _addresses_of(name)]
    if reaching:
        os.environ[VARIABLE] = reaching[0]


def interface_text() -> str:
    """Describe the address that gloo uses here, and how to choose another, for an error."""
    chosen = os.environ.get(VARIABLE)
    if chosen:  # gloo, too, takes the first address of an interface
        addresses = [address for name in chosen.split(",") for address in _addresses_of(name)[:1]]
        where = f"{', '.join(addresses) or 'no address'} (interface {chosen})"
    else:
        name = socket.gethostname()
        where = f"{_address_of_host(name)} (host name {name})"
    return f"gloo uses {where}: on every node set {VARIABLE} to an interface that all nodes reach"


def _source_towards(host: str) -> str:
    """Return this host's address from which packets to `host` would leave; sends no packet."""
    family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _address_of_host(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError:
        return "127.0.0.1"  # gloo's choice if the name does not resolve


def _addresses_of(interface: str) -> list[str]:
    """Return the addresses of an interface, IPv4 first."""
    import psutil

    addresses = psutil.net_if_addrs().get(interface, [])
    ip = (entry.address for entry in addresses if entry.family != psutil.AF_LINK)
    return [address.partition("%")[0] for address in ip]


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
