"""The emulated cluster: real rates on real links, the right NICs, and a complete teardown."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.ranks import ROOT
from tests.helpers.refusals import refused
from tests.helpers.scripts import lives
from tests.helpers.warm_process import HANGS_AFTER
from tests.helpers.warm_python import run_python, warm_python
from tests.tools.cluster.test_cluster import spec as spec_of
from tools.cluster import launch, network, state
from tools.cluster.counters import reset_traffic, traffic
from tools.cluster.launch import run
from tools.cluster.lifecycle import cluster, down, up
from tools.cluster.processes import processes_in
from tools.cluster.state import Cluster
from tools.emulated_cluster import main, make_parser

SCRIPT = str(ROOT / "tools/emulated_cluster.py")
UP = ("up", "--nodes", "2", "--ranks-per-node", "2", "--inter", "1mbit")
NAME = f"test-{os.getpid()}"
INTER = 100_000_000


def call(*args: object) -> subprocess.CompletedProcess[str]:
    return run_python([SCRIPT, *args])


def leftovers(name: str) -> list[str]:
    namespaces = network.NETNS.glob(f"paro-{name}-*")
    files = state.RUNTIME.glob(f"*{name}*")
    return [str(path) for path in (*namespaces, *files)]


# The command line


def test_flags_after_the_script_are_the_scripts() -> None:
    script = ["train.py", "--name", "x", "--", "--help"]
    for words in (script, ["--", *script]):
        args = make_parser().parse_args(["run", "--name", "mine", *words])
        assert (args.name, args.argv) == ("mine", words)


def test_a_mistake_is_one_line_and_status_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    refused(lambda: main(["down"]), "needs root")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    refused(lambda: main(["up", "--nodes", "2"]), "--ranks-per-node")
    refused(lambda: main([*UP[:-1], "fast"]), "--inter: 'fast'")
    refused(lambda: main(["fly"]), "invalid choice: 'fly'")
    monkeypatch.setattr(shutil, "which", lambda _tool: None)
    refused(lambda: main(["bytes"]), "needs ip and tc: install the package iproute2")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(sys, "argv", ["emulated_cluster.py", "down"])
    refused(lambda: runpy.run_path(SCRIPT, run_name="__main__"), "needs Linux, not darwin")


# Real links


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Cluster]:
    with cluster(spec_of(NAME)) as made:
        yield made
    assert not leftovers(NAME)


SERVER = """
import socket, sys, threading, time
size, num_flows = int(sys.argv[2]), int(sys.argv[3])
server = socket.create_server((sys.argv[1], 7000))
print("ready", flush=True)
flows = [server.accept()[0] for _ in range(num_flows)]
start = time.monotonic()
for flow in flows: flow.sendall(b"!")
def receive(flow):
    while flow.recv(1 << 20):
        pass
threads = [threading.Thread(target=receive, args=(flow,)) for flow in flows]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(num_flows * size * 8 / (time.monotonic() - start))
"""
CLIENT = """
import socket, sys, threading
servers = [socket.create_connection((address, 7000)) for address in sys.argv[2:]]
for server in servers: server.recv(1)  # all at once, after all clocks have started
data = bytes(int(sys.argv[1]))
for server in servers: threading.Thread(target=server.sendall, args=(data,)).start()
"""


def in_node(made: Cluster, node: int, program: str, *args: object) -> subprocess.Popen[str]:
    command = [*("ip", "netns", "exec", made.spec.node(node), sys.executable, "-c", program)]
    return subprocess.Popen([*command, *map(str, args)], stdout=subprocess.PIPE, text=True)


def measured_rates(made: Cluster, flows: list[tuple[int, int]], size: int) -> list[float]:
    """Sends between nodes, all at once; the bits per second at each receiver."""
    servers = {}
    for node in sorted({receiver for _, receiver in flows}):
        num_flows = sum(receiver == node for _, receiver in flows)
        servers[node] = in_node(made, node, SERVER, f"10.77.{node}.1", size, num_flows)
        assert servers[node].stdout.readline() == "ready\n"  # type: ignore[union-attr]
    clients = []
    for node in {sender for sender, _ in flows}:
        addresses = [f"10.77.{receiver}.1" for sender, receiver in flows if sender == node]
        clients.append(in_node(made, node, CLIENT, size, *addresses))
    rates = [float(server.communicate()[0]) for server in servers.values()]
    assert not any(client.wait() for client in clients)
    return rates


@pytest.mark.verify
@pytest.mark.root
def test_links_have_their_rate_each_way_also_among_several() -> None:
    with cluster(spec_of(f"{NAME}-rate", nodes=3, ranks_per_node=1, intra="200mbit")) as made:
        rates = measured_rates(made, [(0, 1), (1, 0)], 3_000_000)
        rates += measured_rates(made, [(0, 2), (1, 2)], 1_500_000)
        rates.append(2 * min(measured_rates(made, [(2, 0), (2, 1)], 1_500_000)))
        (inside,) = measured_rates(made, [(0, 0)], 5_000_000)
    # TCP gets 0.96 of a link, and a bucket of 64 KiB is free: more means that there is no limit. A
    # busy machine is slower.
    assert all(0.25 * INTER < rate < 1.03 * INTER for rate in rates), rates
    assert 0.5 * INTER < inside < 2.06 * INTER
    assert not leftovers(f"{NAME}-rate")


PROBE = """
import os, socket, threading, time
rank, local, node = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "GROUP_RANK"))
seen = [str(rank), os.environ["GLOO_SOCKET_IFNAME"], os.environ["OMP_NUM_THREADS"]]
os.write(1, f"{' '.join(seen)}\\n".encode())  # in one piece
own = f"10.77.{node}.{local + 1}"
server = socket.create_server((own, 7000))
def receive():
    for _ in range(2):
        flow = server.accept()[0]
        while flow.recv(1 << 20):
            pass
receiver = threading.Thread(target=receive)
receiver.start()
same_place, neighbour = f"10.77.{1 - node}.{local + 1}", f"10.77.{node}.{2 - local}"
for size, address in ((1_000_000, same_place), (3_000_000, neighbour)):
    while True:
        try:
            flow = socket.create_connection((address, 7000))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    flow.sendall(bytes(size))
    flow.close()
receiver.join()
"""


@pytest.mark.root
@pytest.mark.usefixtures("warm_nodes")
def test_every_rank_uses_its_own_nic_and_the_loopback_inside_its_node(
    two_nodes: Cluster,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    reset_traffic(two_nodes)
    assert run(two_nodes, [str(script)]) == 0
    shown = capfd.readouterr().out.splitlines()
    assert sorted(shown) == ["0 nic0 1", "1 nic1 1", "node 1: 2 nic0 1", "node 1: 3 nic1 1"]
    measured = traffic(two_nodes)
    assert len(measured.nics) == 4
    for nic in measured.nics:  # plus a little to torchrun's store
        assert 1_030_000 < nic.sent_bytes < 1_200_000, nic
        assert 1_030_000 < nic.received_bytes < 1_200_000, nic
    assert all(size > 6_000_000 for size in measured.inside_bytes)


MEET = """
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


@pytest.mark.verify
@pytest.mark.root
@pytest.mark.usefixtures("warm_nodes")
def test_ranks_of_two_nodes_meet_where_names_of_hosts_are_loopback_addresses(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(f"{NAME}-names", ranks_per_node=1)
    hosts = "".join(f"127.0.1.1 {spec.node(node)}\n" for node in range(2))
    monkeypatch.setattr(launch, "hosts_file", lambda _spec: hosts)
    script = tmp_path / "meet.py"
    script.write_text(MEET)
    with cluster(spec) as made:
        assert run(made, [str(script)], env={"PYTHONPATH": str(ROOT)}) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["nic0", "node 1: nic0"]


@pytest.mark.verify
@pytest.mark.root
def test_bytes_are_shown_and_reset(two_nodes: Cluster, tmp_path: Path) -> None:
    before = json.loads(call("bytes", "--name", NAME, "--json", "--reset").stdout)
    assert [(nic["node"], nic["nic"]) for nic in before["nics"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    measured_rates(two_nodes, [(1, 0)], 100_000)
    after = json.loads(call("bytes", "--name", NAME, "--json").stdout)
    sent = {(nic["node"], nic["nic"]): nic["sent_bytes"] for nic in after["nics"]}
    assert 100_000 < sent[1, 0] < 130_000
    assert after["sent_bytes"] == sum(sent.values())
    assert f"{sent[1, 0]:,}" in call("bytes", "--name", NAME).stdout


# Ends of a run


@pytest.mark.root
@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("sys.exit(2)", 2),
        pytest.param("1 / 0 if rank == 3 else time.sleep(600)", 1, marks=pytest.mark.verify),
    ],
)
def test_the_status_is_that_of_the_rank_that_failed(
    two_nodes: Cluster, tmp_path: Path, program: str, status: int
) -> None:
    script = tmp_path / "fails.py"
    script.write_text(f"import os, sys, time\nrank = int(os.environ['RANK'])\n{program}\n")
    done = call("run", "--name", NAME, "--", script)
    assert done.returncode == status
    assert f"ended with status {status}" in done.stderr
    assert list(processes_in(two_nodes.spec.namespaces)) == []


# A child outside its rank's session, which must not survive the run either.
SLEEP = """
import os, subprocess, time
subprocess.Popen(["sleep", "600"], start_new_session=True)
os.write(1, b"asleep\\n")  # at once, or lines of several ranks mix
time.sleep(600)
"""


def start_sleepers(name: str, folder: Path) -> subprocess.Popen[str]:
    """A `run` whose ranks have reached their sleep."""
    script = folder / "sleep.py"
    script.write_text(SLEEP)
    command = [warm_python() / "python", SCRIPT, "run", "--name", name, str(script)]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    for _ in range(4):
        assert "asleep" in running.stdout.readline()
    return running


@pytest.mark.root
def test_a_signal_ends_a_run_and_one_runs_at_a_time(two_nodes: Cluster, tmp_path: Path) -> None:
    running = start_sleepers(NAME, tmp_path)
    refused(call("run", "--name", NAME, tmp_path / "sleep.py"), "one script at a time")
    refused(call(*UP, "--name", NAME), "is up already (2 nodes x 2 ranks")
    running.send_signal(signal.SIGINT)
    assert running.wait(timeout=HANGS_AFTER) == 128 + signal.SIGINT
    assert list(processes_in(two_nodes.spec.namespaces)) == []


@pytest.mark.verify
@pytest.mark.root
def test_down_removes_what_a_killed_run_left(tmp_path: Path) -> None:
    name = f"{NAME}-killed"
    made = up(spec_of(name))
    running = start_sleepers(name, tmp_path)
    running.kill()
    running.wait()
    left = list(processes_in(made.spec.namespaces))
    assert len(left) >= 4  # the children outside their ranks' sessions
    done = call("down", "--name", name)
    assert done.returncode == 0, done.stderr
    assert not leftovers(name)
    assert not any(map(lives, left))


# Creation and removal of a cluster


@pytest.mark.root
def test_what_was_made_is_removed_when_up_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{NAME}-up"
    run_batch = network._run_batch
    seen = []

    def interrupted(batch: object) -> None:
        run_batch(batch)  # type: ignore[arg-type]
        seen.append(leftovers(name))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(network, "_run_batch", interrupted)
    with pytest.raises(SystemExit) as ended:
        up(spec_of(name))
    assert ended.value.code == 128 + signal.SIGTERM
    # Three namespaces and the folder: creation stopped there.
    assert [len(found) for found in seen] == [4]
    assert not leftovers(name)


@pytest.mark.root
@pytest.mark.parametrize("steps", [1, *(pytest.param(n, marks=pytest.mark.verify) for n in (0, 4))])
def test_down_removes_what_a_killed_up_left(steps: int) -> None:
    name = f"{NAME}-part"
    spec = spec_of(name)
    state.claim(name)
    state.save(Cluster(spec=spec, status="building"))
    building = network.build(spec, [])
    for _ in range(steps):
        next(building)
    # Interrupted between a namespace and its mark.
    if steps == 1:
        network.run_tool(["ip", "netns", "add", spec.node(0)])
    refused(lambda: up(spec), "cut off")
    assert down(name) == []
    assert not leftovers(name)


@pytest.mark.root
def test_what_others_made_stays_and_a_cluster_that_is_not_up_is_one_line() -> None:
    name = f"{NAME}-other"
    theirs = spec_of(name).node(1)
    network.run_tool(["ip", "netns", "add", theirs])
    try:
        refused(call(*UP, "--name", name), f"{theirs} exists already")
        assert leftovers(name) == [str(network.NETNS / theirs)]
        assert call("down", "--name", name).returncode == 2
        assert (network.NETNS / theirs).exists()
    finally:
        network.remove(theirs)
    for command in ("bytes", "down", "run"):
        refused(call(command, "--name", f"{NAME}-none"), f"'{NAME}-none'")
