"""The specification of a cluster on one machine: sizes, rates, and all names and addresses."""

# Nothing of a cluster is in the host's own network: the bridge has a namespace of its own in
# addition to one for each node, so that neither names nor addresses can clash with the host's, or
# with those of another cluster. On 2 nodes with 2 NICs each:
#
#     paro-NAME-node0          paro-NAME-switch          paro-NAME-node1
#     nic0  10.77.0.1  ----  n0nic0 .--------. n1nic0  ----  nic0  10.77.1.1
#     nic1  10.77.0.2  ----  n0nic1 | bridge | n1nic1  ----  nic1  10.77.1.2
#     lo                            '--------'                lo

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from paro.errors import UserError, about
from paro.machine.machine import bits_per_second

NAME = r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?"
MAX_NODES = 256  # a byte of an address
MAX_RANKS = 254  # another byte, from 1
MAX_PORTS = 1023  # limit of the kernel's bridge
MASTER_PORT = 29500  # no other program runs in node 0's namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """A cluster: `inter` is the rate of each NIC, `intra` that of each rank inside its node."""

    nodes: int
    ranks_per_node: int
    inter: str
    intra: str | None = None  # None: unshaped
    nic: Literal["per-rank", "shared"] = "per-rank"
    name: str = "default"

    def __post_init__(self) -> None:
        check_name(self.name)
        for flag, value, most in (
            ("--nodes", self.nodes, MAX_NODES),
            ("--ranks-per-node", self.ranks_per_node, MAX_RANKS),
        ):
            if not 1 <= value <= most:
                raise UserError(f"{flag} {value}: give a number from 1 to {most}")
        if self.nic not in ("per-rank", "shared"):
            raise UserError(f"--nic {self.nic}: give per-rank or shared")
        if self.nodes * self.nics > MAX_PORTS:
            raise UserError(
                f"--nodes {self.nodes} with {self.nics} NICs each need {self.nodes * self.nics} "
                f"ports and a bridge has {MAX_PORTS}; give fewer, or --nic shared"
            )
        for flag, rate in (("--inter", self.inter), ("--intra", self.intra)):
            with about(f"{flag}: "):
                bits_per_second(rate or "8bit")

    @property
    def nics(self) -> int:
        """Number of NICs of a node."""
        return self.ranks_per_node if self.nic == "per-rank" else 1

    @property
    def switch(self) -> str:
        """The name of the bridge's namespace."""
        return f"paro-{self.name}-switch"

    @property
    def namespaces(self) -> tuple[str, ...]:
        return (self.switch, *map(self.node, range(self.nodes)))

    def node(self, node: int) -> str:
        """Return the name of a node's namespace."""
        return f"paro-{self.name}-node{node}"

    def describe(self) -> str:
        card = "a NIC per rank" if self.nic == "per-rank" else "one NIC per node"
        inside = f"{self.intra} per rank" if self.intra else "not shaped"
        return (
            f"{self.nodes} nodes x {self.ranks_per_node} ranks, {card}, {self.inter} per NIC, "
            f"inside a node {inside}"
        )


def check_name(name: str) -> None:
    """Raise `UserError` for a name that cannot be part of a namespace's name."""
    if not re.fullmatch(NAME, name):
        raise UserError(
            f"--name {name!r}: give up to 32 small letters, digits and hyphens, no hyphen at an end"
        )


def mark_of(name: str) -> str:
    """Return the alias of lo that marks this cluster's namespaces."""
    return f"paro-cluster:{name}"


def is_namespace_of(name: str, namespace: str) -> bool:
    """Return whether a namespace has a name that a cluster `name` would use."""
    return re.fullmatch(rf"paro-{re.escape(name)}-(switch|node\d+)", namespace) is not None


def nic(index: int) -> str:
    """Return a NIC's name in its node."""
    return f"nic{index}"


def port(node: int, index: int) -> str:
    """Return the name of a NIC's other end, at the bridge; at most 9 characters."""
    return f"n{node}nic{index}"


def address(node: int, index: int) -> str:
    """Return the address of a NIC."""
    return f"10.77.{node}.{index + 1}"
