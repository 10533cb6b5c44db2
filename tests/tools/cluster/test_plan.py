"""Names of a cluster, and the output of its nodes in whole lines."""

from __future__ import annotations

import subprocess

import pytest

from tests.helpers.refusals import refused
from tools.cluster.launch import NodeOutput
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
