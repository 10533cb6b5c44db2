"""Output of nodes: whole lines, prefixed with the node's name, on their original stream."""

from __future__ import annotations

import subprocess

import pytest

from tools.cluster.launch import NodeOutput

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
