"""The commands of iproute2 that make a cluster, as data: which batch, for which namespace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from paro.machine.machine import bits_per_second
from tools.cluster.spec import ClusterSpec, address, nic, port

# Each namespace answers for an address from the NIC that has it and from no other, and accepts
# packets on any NIC, since replies may leave by another one. What a connection learned about a path
# is not passed to the next one, or the order of runs would matter. No IPv6, whose housekeeping
# traffic would be counted; `lo` keeps it, since it exists already.
#
# How TCP fills a link must not depend on the machine's own settings. BBR, where it is the default,
# takes the token bucket's first bytes for the path's delay and then leaves a link of 25 Mbit/s idle
# for a fifth of the time; Reno, which every kernel has, fills it to 0.95. And the data queued on
# the loopback should fit a core's cache: with unbounded receive buffers an all-gather of 32 MB by 8
# ranks costs 470 to 690 ms of CPU time, with these 180.
SETTINGS = {
    "net/ipv4/conf/all/arp_ignore": 1,
    "net/ipv4/conf/all/arp_announce": 2,
    "net/ipv4/conf/all/rp_filter": 0,
    "net/ipv4/conf/default/rp_filter": 0,
    "net/ipv4/tcp_congestion_control": "reno",
    "net/ipv4/tcp_no_metrics_save": 1,
    "net/ipv4/tcp_rmem": "4096 65536 131072",  # minimum, initial and maximum bytes of a connection
    "net/ipv6/conf/default/disable_ipv6": 1,
}


@dataclass(frozen=True, slots=True)
class Batch:
    """Lines for `ip -batch` or `tc -batch` inside one namespace."""

    tool: Literal["ip", "tc"]
    namespace: str
    lines: tuple[str, ...]


def batches(spec: ClusterSpec) -> Iterator[Batch]:
    """Yield the batches for the namespaces, which must exist, in order."""
    yield Batch("ip", spec.switch, tuple(_cables(spec)))
    yield Batch("tc", spec.switch, tuple(_port_rates(spec)))
    for node in range(spec.nodes):
        yield Batch("ip", spec.node(node), tuple(_addresses(spec, node)))
        yield Batch("tc", spec.node(node), tuple(_node_rates(spec)))


def _cables(spec: ClusterSpec) -> Iterator[str]:
    """Yield a bridge that forwards at once, and a cable from it to every NIC."""
    yield "link add bridge type bridge stp_state 0 forward_delay 0 mcast_snooping 0"
    yield "link set dev bridge up"
    for node, index in _nics(spec):
        end = port(node, index)
        yield f"link add {end} type veth peer name {nic(index)} netns {spec.node(node)}"
        yield f"link set dev {end} master bridge up"


def _addresses(spec: ClusterSpec, node: int) -> Iterator[str]:
    """Yield the NICs' addresses, and to NIC k of another node a route through this node's NIC k.

    gloo listens on its own NIC's address but connects from any, so the destination has to determine
    the outgoing NIC.
    """
    yield "link set dev lo up"
    for index in range(spec.nics):
        yield f"address add {address(node, index)}/32 dev {nic(index)}"
        yield f"link set dev {nic(index)} up"
    for other, index in _nics(spec):
        if other != node:
            own = address(node, index)
            yield f"route add {address(other, index)}/32 dev {nic(index)} scope link src {own}"


def _port_rates(spec: ClusterSpec) -> Iterator[str]:
    """Yield commands of tc that limit the rate at which a NIC receives, from all senders."""
    for node, index in _nics(spec):
        yield shaped(port(node, index), bits_per_second(spec.inter))


def _node_rates(spec: ClusterSpec) -> Iterator[str]:
    """Yield commands of tc that limit the rate at which a NIC sends, and that of the loopback."""
    for index in range(spec.nics):
        yield shaped(nic(index), bits_per_second(spec.inter))
    if spec.intra:
        yield shaped("lo", bits_per_second(spec.intra) * spec.ranks_per_node)


def shaped(device: str, bits: int) -> str:
    """Return a token bucket that holds a millisecond, and at least two of the largest packets.

    A packet larger than the bucket is segmented on a NIC but dropped on the loopback.
    """
    burst = max(2 * 65536 if device == "lo" else 65536, bits // 8 // 1000)
    return f"qdisc add dev {device} root tbf rate {bits}bit burst {burst}b latency 500ms"


def _nics(spec: ClusterSpec) -> Iterator[tuple[int, int]]:
    return ((node, index) for node in range(spec.nodes) for index in range(spec.nics))
