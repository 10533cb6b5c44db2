"""Elastic torchrun agents, one in each node of a cluster, that can be lost and started again."""

# `run` in launch.py starts one script and ends it as a whole. Here every node has its own agent,
# its own host name, and a rendezvous (c10d) in which agents may leave and return.

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tools.cluster.launch import hosts_file, start, torchrun
from tools.cluster.processes import children, end_processes, environment
from tools.cluster.spec import MASTER_PORT, ClusterSpec, address

# A lost agent is noticed after interval * attempts; torchrun's defaults are 5 s and 3.
_KEEP_ALIVE = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1"


class Agents:
    """The agents of one training; `argv` is the script with its arguments.

    With `least_nodes` it trains with so many, by default with all.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        argv: Sequence[str],
        folder: Path,
        *,
        least_nodes: int | None = None,
    ) -> None:
        self.spec = spec
        self._least_nodes = least_nodes or spec.nodes
        self._argv = argv
        self._folder = folder
        self._rendezvous = 0
        self._noted: set[int] = set()
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        (folder / "hosts").write_text(hosts_file(spec), encoding="utf-8")

    def start(self, node: int) -> None:
        """Start the agent of a node, which joins the others."""
        assert node not in self.running(), f"node {node} has an agent"
        log = (self._folder / f"node{node}.log").open("ab")
        flags = {
            "--nnodes": f"{self._least_nodes}:{self.spec.nodes}",
            "--rdzv-backend": "c10d",
            # Another port when the node of the rendezvous was lost.
            "--rdzv-endpoint": f"{address(0, 0)}:{MASTER_PORT + self._rendezvous}",
            "--rdzv-id": self.spec.name,
            "--rdzv-conf": f"{_KEEP_ALIVE},is_host={int(node == 0)}",
            "--max-restarts": 1000,
        }
        program, hosts = ("-m", "torch.distributed.run"), self._folder / "hosts"
        command = torchrun(self.spec, node, self._argv, hosts, program=program, flags=flags)
        # Else the ranks meet at the store of the first agent, which may have been lost.
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        with log:
            self._agents[node] = start(command, self.spec, env, **streams)

    def start_all(self) -> None:
        """Start the agents of all nodes that have none, with a new rendezvous."""
        self._rendezvous += 1
        for node in range(self.spec.nodes):
            if node not in self.running():
                self.start(node)

    def running(self) -> set[int]:
        """Return the nodes whose agent runs."""
        return {node for node, agent in self._agents.items() if agent.poll() is None}

    def ended_well(self) -> bool:
        """Return whether all agents have ended with status 0."""
        return all(agent.poll() == 0 for agent in self._agents.values())

    def ranks(self) -> dict[int, int]:
        """Return the process of every rank that runs, by rank."""
        return {
            int(entry.removeprefix(b"RANK=")): pid
            for agent in self._agents.values()
            for pid in children(agent.pid)
            for entry in environment(pid)
            if entry.startswith(b"RANK=")
        }

    def note_ranks(self) -> None:
        """Note the ranks that run, for `none_is_left`."""
        self._noted = set(self.ranks().values())

    def none_is_left(self) -> bool:
        """Return whether all ranks that were noted have ended."""
        return not self._noted & set(self.ranks().values())

    def lose(self, node: int) -> None:
        """Kill all processes of a node at once."""
        end_processes([self.spec.node(node)], started_by_run=self.spec.name)
        self._agents[node].wait()

    def end(self) -> None:
        """End all that is left."""
        end_processes(map(self.spec.node, range(self.spec.nodes)), started_by_run=self.spec.name)
        for agent in self._agents.values():
            agent.wait()
