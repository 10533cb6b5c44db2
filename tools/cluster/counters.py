"""The bytes that crossed each NIC and each loopback, as the kernel's queues counted them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from tools.cluster import network, state
from tools.cluster.spec import ClusterSpec, nic, port
from tools.cluster.state import Cluster

# Matches `tc -statistics qdisc show`, which in older versions has no JSON for every queue.
_QUEUE = re.compile(r"^qdisc tbf \S+ dev (\S+) root .*\n Sent (\d+) bytes", re.M)


@dataclass(frozen=True, slots=True, kw_only=True)
class NicBytes:
    """Bytes that a NIC sent and received, including Ethernet, IP and TCP headers."""

    node: int
    nic: int
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes since the counters were set to zero: of each NIC, and inside each node."""

    nics: tuple[NicBytes, ...]
    inside_bytes: tuple[int, ...]

    @property
    def sent(self) -> int:
        """Bytes sent by all NICs."""
        return sum(nic.sent_bytes for nic in self.nics)


def traffic(cluster: Cluster) -> Traffic:
    """Return the bytes that crossed the links since `up`, or since `reset_traffic`."""
    spec = cluster.spec
    # Another process may have reset the counters since this cluster was opened.
    baseline = state.open_cluster(spec.name).baseline
    now = counters(spec)
    since = {name: count - baseline.get(name, 0) for name, count in now.items()}
    nics = tuple(
        NicBytes(
            node=node,
            nic=index,
            sent_bytes=since[f"{spec.node(node)}/{nic(index)}"],
            received_bytes=since[f"{spec.switch}/{port(node, index)}"],
        )
        for node in range(spec.nodes)
        for index in range(spec.nics)
    )
    inside = tuple(since[f"{spec.node(node)}/lo"] for node in range(spec.nodes))
    return Traffic(nics=nics, inside_bytes=inside)


def reset_traffic(cluster: Cluster) -> None:
    """Set the counters to zero."""
    current = state.open_cluster(cluster.spec.name)
    state.save(replace(current, baseline=counters(cluster.spec)))


def counters(spec: ClusterSpec) -> dict[str, int]:
    """Return the kernel's counts so far, by namespace and device."""
    counted = {}
    for namespace in spec.namespaces:
        shown = network.run_tool(["tc", "-n", namespace, "-statistics", "qdisc", "show"])
        for device, sent in _QUEUE.findall(shown):
            counted[f"{namespace}/{device}"] = int(sent)
    # An unshaped loopback has no queue; the device's own counters serve shaped and unshaped ones.
    for node in map(spec.node, range(spec.nodes)):
        (loopback,) = (link for link in network.links(node) if link["ifname"] == "lo")
        counted[f"{node}/lo"] = int(loopback["stats64"]["tx"]["bytes"])
    return counted
