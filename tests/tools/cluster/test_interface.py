"""Ranks on several nodes meet where the name of each host is a loopback address."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.ranks import ROOT
from tools.cluster import launch
from tools.cluster.lifecycle import cluster
from tools.cluster.spec import ClusterSpec

SCRIPT = """
import os
del os.environ["GLOO_SOCKET_IFNAME"]
from paro.distributed.process_group import RuntimeConfig, distributed
from paro.distributed.world import read_world
world = read_world()
with distributed(RuntimeConfig(distributed_backend="gloo"), world) as control:
    assert control.gather(world.rank) == [0, 1]
os.write(1, f"{os.environ['GLOO_SOCKET_IFNAME']}\\n".encode())
os._exit(0)  # as entry scripts do: gloo's threads may abort an interpreter that shuts down
"""


@pytest.mark.root
@pytest.mark.usefixtures("warm_nodes")
def test_ranks_of_two_nodes_meet(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ClusterSpec(name=f"test-{os.getpid()}-names", nodes=2, ranks_per_node=1, inter="100mbit")
    hosts = "".join(f"127.0.1.1 {spec.node(node)}\n" for node in range(2))
    monkeypatch.setattr(launch, "hosts_file", lambda _spec: hosts)
    script = tmp_path / "meet.py"
    script.write_text(SCRIPT)
    with cluster(spec) as made:
        assert launch.run(made, [str(script)], env={"PYTHONPATH": str(ROOT)}) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["nic0", "node 1: nic0"]
