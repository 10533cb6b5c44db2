"""Runs a script on all ranks of a cluster: torchrun in every node, over the right interfaces."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from typing import IO, Any

from paro.errors import UserError
from tools.cluster import network, state
from tools.cluster.interrupts import handling
from tools.cluster.processes import RUN_VARIABLE, end_processes
from tools.cluster.spec import MASTER_PORT, ClusterSpec, address, nic
from tools.cluster.state import Cluster

_POLL_SECONDS = 0.1
# After a node failed, the others have this long to print their errors.
_LAST_WORDS_SECONDS = 1.0
# From SIGTERM to SIGKILL after a failure; and after a signal from the user, on which a script may
# save its work: torchrun kills it after 30 s.
_CLEANUP_SECONDS = 10.0
_SAVING_SECONDS = 40.0

_LAST_OUTPUT_SECONDS = 2.0

# `ip netns exec` gives a process its own mount namespace. torch looks up the name of every address
# that it connects to and warns if there is none.
_WITH_HOSTS = """\
echo "$1" > /proc/sys/kernel/hostname
[ ! -e /etc/hosts ] || mount --bind "$2" /etc/hosts
shift 2
exec "$@"
"""
_GIVE_NIC = 'GLOO_SOCKET_IFNAME=nic$LOCAL_RANK exec "$@"'

_STDOUT, _STDERR = 1, 2
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def run(cluster: Cluster, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> int:
    """Run a script with its arguments on every rank and return its status.

    The status is that of the first failing rank, as a shell reports it. SIGINT, SIGTERM and SIGHUP
    are forwarded; then it returns 128 plus their number once all processes have ended; a second one
    kills. Node 0's output appears as it is, lines of other nodes follow their node's name. No
    process is left. `env` is added to this process's environment.
    """
    network.check_system()
    name = cluster.spec.name
    if not argv or not Path(argv[0]).is_file():
        given = f"no file {argv[0]!r}" if argv else "nothing to run"
        raise UserError(f"{given}: give a Python script and its arguments")
    with state.locked(name) as held:
        if not held:
            raise UserError(f"cluster {name!r} is busy: it runs one script at a time")
        spec = state.open_cluster(name).spec
        network.check_namespaces(spec)
        folder = state.folder_of(name) / "run"
        try:
            folder.mkdir(exist_ok=True)
            (folder / "hosts").write_text(hosts_file(spec), encoding="utf-8")
            return _run(spec, argv, env or {}, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _run(spec: ClusterSpec, argv: Sequence[str], env: Mapping[str, str], folder: Path) -> int:
    namespaces = list(map(spec.node, range(spec.nodes)))
    end_processes(namespaces, started_by_run=spec.name)  # left over from a run that was killed
    signals: list[int] = []
    nodes: dict[int, subprocess.Popen[bytes]] = {}
    with handling(lambda number, _: signals.append(number)):
        output = None
        try:
            for node in range(spec.nodes):
                command = _node_command(spec, node, argv, folder)
                sys.stdout.flush()
                sys.stderr.flush()
                pipe = None if node == 0 else subprocess.PIPE
                stdin = subprocess.PIPE if node == 0 else subprocess.DEVNULL
                nodes[node] = start(command, spec, env, stdin=stdin, stdout=pipe, stderr=pipe)
            output = NodeOutput(nodes)
            return _watch(nodes, signals)
        finally:
            end_processes(namespaces, started_by_run=spec.name)
            if output is not None:
                output.finish(_LAST_OUTPUT_SECONDS)
            for process in nodes.values():
                process.wait()


def _node_command(spec: ClusterSpec, node: int, argv: Sequence[str], folder: Path) -> list[str]:
    flags = {
        "--nnodes": spec.nodes,
        "--node-rank": node,
        "--master-addr": address(0, 0),
        "--master-port": MASTER_PORT,
        "--log-dir": folder / str(node),
    }
    program = ("-P", str(Path(__file__).with_name("node.py")))
    return torchrun(spec, node, argv, folder / "hosts", program=program, flags=flags)


def torchrun(
    spec: ClusterSpec,
    node: int,
    argv: Sequence[str],
    hosts: Path,
    *,
    program: Sequence[str],
    flags: Mapping[str, object],
) -> list[str]:
    """Start a script on the ranks of a node: torchrun in its namespaces, with `hosts`.

    `program` is Python's arguments for torchrun, `flags` those of torchrun that tell how its nodes
    meet. With several NICs every rank has its own in its environment.
    """
    flags = {
        **flags,
        "--nproc-per-node": spec.ranks_per_node,
        "--local-addr": address(node, 0),
    }
    rank = [sys.executable, "-u", *argv]
    return [
        *("ip", "netns", "exec", spec.node(node), "unshare", "--uts"),
        *("sh", "-ec", _WITH_HOSTS, "node", spec.node(node), str(hosts)),
        *(sys.executable, *program, *(f"{flag}={value}" for flag, value in flags.items())),
        *("--no-python", *(rank if spec.nics == 1 else ["sh", "-c", _GIVE_NIC, "rank", *rank])),
    ]


def hosts_file(spec: ClusterSpec) -> str:
    """Return the machine's own host names, and one for each NIC."""
    hosts = Path("/etc/hosts")
    lines = hosts.read_text(encoding="utf-8").splitlines() if hosts.exists() else []
    for node in range(spec.nodes):
        for index in range(spec.nics):
            host = f"node{node}-{nic(index)}"
            # torch also looks up IPv4 addresses in their IPv4-mapped IPv6 form.
            lines += [f"{address(node, index)} {host}", f"::ffff:{address(node, index)} {host}"]
    return "\n".join(lines) + "\n"


def start(
    command: Sequence[str], spec: ClusterSpec, env: Mapping[str, str], **streams: Any
) -> subprocess.Popen[bytes]:
    """Start `torchrun` of a node, with `env` added to this process's environment.

    If this process is killed, torchrun gets SIGTERM and ends its ranks.
    """
    variables = {RUN_VARIABLE: spec.name, "GLOO_SOCKET_IFNAME": nic(0)}
    return subprocess.Popen(
        command,
        env={"OMP_NUM_THREADS": "1", **os.environ, **env, **variables},
        start_new_session=True,  # so that a terminal's Ctrl-C arrives once, forwarded from here
        preexec_fn=partial(_LIBC.prctl, _PR_SET_PDEATHSIG, signal.SIGTERM),
        **streams,
    )


def _watch(nodes: Mapping[int, subprocess.Popen[bytes]], signals: list[int]) -> int:
    """Wait until all nodes have ended; one failure or one signal ends them all."""
    running = dict(nodes)
    status = 0
    signals_seen = 0
    end_at = kill_at = float("inf")
    while running:
        time.sleep(_POLL_SECONDS)
        now = time.monotonic()
        for node, process in nodes.items():
            if node in running and process.poll() is not None:
                del running[node]
                if (code := process.returncode) != 0 and status == 0:
                    status = code if code >= 0 else 128 - code  # as a shell has it
                    end_at = now + _LAST_WORDS_SECONDS
                    kill_at = end_at + _CLEANUP_SECONDS
        if running.keys() <= {0} and (stdin := nodes[0].stdin) is not None:
            stdin.close()  # tells node 0, whose store the others use, that they have all ended
        if len(signals) > signals_seen == 0:
            status = 128 + signals[0]
            _send(signals[0], running)
            end_at, kill_at = float("inf"), now + _SAVING_SECONDS
        elif len(signals) > signals_seen:
            kill_at = now
        signals_seen = len(signals)
        if now >= end_at:
            _send(signal.SIGTERM, running)
            end_at = float("inf")
        if now >= kill_at:
            _send(signal.SIGKILL, running)
            kill_at = float("inf")
    return status


def _send(number: int, processes: Mapping[int, subprocess.Popen[bytes]]) -> None:
    for process in processes.values():
        process.send_signal(number)


class NodeOutput:
    """The output of nodes, forwarded line by line, so that lines of two never mix."""

    def __init__(self, nodes: Mapping[int, subprocess.Popen[bytes]]) -> None:
        self._writing = Lock()
        self._threads = [
            Thread(target=self._forward, args=(pipe, f"node {node}: ", target), daemon=True)
            for node, process in nodes.items()
            for pipe, target in ((process.stdout, _STDOUT), (process.stderr, _STDERR))
            if pipe is not None
        ]
        for thread in self._threads:
            thread.start()

    def finish(self, seconds: float) -> None:
        """Wait for up to `seconds` until all that is still in the pipes is forwarded."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _forward(self, pipe: IO[bytes], prefix: str, target: int) -> None:
        with pipe:
            for line in pipe:
                data = prefix.encode() + line.removesuffix(b"\n") + b"\n"
                with self._writing, suppress(OSError):  # of a reader that has ended, or a full disk
                    while data:
                        data = data[os.write(target, data) :]
