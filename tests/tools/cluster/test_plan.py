"""Names, addresses and commands of a cluster, and the output of its nodes in whole lines."""

from __future__ import annotations

import subprocess

import pytest

from tests.helpers.refusals import refused
from tools.cluster.launch import NodeOutput
from tools.cluster.plan import batches, shaped
from tools.cluster.spec import ClusterSpec, is_namespace_of


def spec(name: str = "a", **fields: object) -> ClusterSpec:
    sizes = {"nodes": 2, "ranks_per_node": 2, "inter": "100mbit"}
    return ClusterSpec(name=name, **{**sizes, **fields})  # type: ignore[arg-type]


def test_what_cannot_be_built_is_refused() -> None:
    refused(lambda: spec(nodes=0), "--nodes 0")
    refused(lambda: spec(ranks_per_node=300), "--ranks-per-node 300")
    refused(lambda: spec(nodes=200, ranks_per_node=8), "1600 ports")
    refused(lambda: spec(inter="quick"), "--inter: 'quick'")
    refused(lambda: spec(intra="quick"), "--intra: 'quick'")
    refused(lambda: spec(nic="two"), "--nic two")
    refused(lambda: spec("../x"), "--name '../x'")


def test_namespaces_of_other_clusters_are_told_apart() -> None:
    ours = spec("a", nodes=12).namespaces
    assert all(is_namespace_of("a", namespace) for namespace in ours)
    for name in ("b", "a-node1", "a-switch"):
        assert not any(is_namespace_of("a", namespace) for namespace in spec(name).namespaces)


def test_routes_and_rates_of_a_small_cluster() -> None:
    commands = {(b.tool, b.namespace): b.lines for b in batches(spec(intra="1gbit"))}
    routes = [line for line in commands["ip", "paro-a-node1"] if line.startswith("route")]
    assert routes == [
        "route add 10.77.0.1/32 dev nic0 scope link src 10.77.1.1",
        "route add 10.77.0.2/32 dev nic1 scope link src 10.77.1.2",
    ]
    nic = "root tbf rate 100000000bit burst 65536b latency 500ms"
    # Both ends of every cable, and one loopback for both ranks.
    assert commands["tc", "paro-a-node1"] == (
        f"qdisc add dev nic0 {nic}",
        f"qdisc add dev nic1 {nic}",
        "qdisc add dev lo root tbf rate 2000000000bit burst 250000b latency 500ms",
    )
    ports = ("n0nic0", "n0nic1", "n1nic0", "n1nic1")
    assert commands["tc", "paro-a-switch"] == tuple(f"qdisc add dev {p} {nic}" for p in ports)
    assert "burst 131072b" in shaped("lo", 100_000_000), "the loopback's largest packet fits"
    cables = [line for line in next(batches(spec(nic="shared"))).lines if "veth" in line]
    assert len(cables) == 2, "one for a node"


# A line in two pieces, an empty one, and a last one without an end.
PIECES = "printf 'one l'; sleep 0.2; printf 'ine\\n\\n'; echo mistake >&2; printf end"


@pytest.mark.process
def test_lines_are_whole_and_named(capfd: pytest.CaptureFixture[str]) -> None:
    nodes = {
        node: subprocess.Popen(["sh", "-c", PIECES], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for node in (1, 12)
    }
    output = NodeOutput(nodes)
    output.finish(seconds=10.0)
    printed = capfd.readouterr()
    lines = printed.out.splitlines(keepends=True)
    for node, process in nodes.items():
        assert process.wait() == 0
        own = [line for line in lines if line.startswith(f"node {node}: ")]
        assert own == [f"node {node}: {text}\n" for text in ("one line", "", "end")]
    assert len(lines) == 6
    assert set(printed.err.splitlines()) == {"node 1: mistake", "node 12: mistake"}
