"""Emulates a cluster on one machine: nodes with real, slow links between them, to run scripts."""

# The layout is drawn in tools/cluster/spec.py. From Python:
#
#     from tools.cluster.launch import run
#     from tools.cluster.lifecycle import cluster
#     from tools.cluster.spec import ClusterSpec
#
#     with cluster(ClusterSpec(nodes=2, ranks_per_node=4, inter="100mbit")) as two_nodes:
#         status = run(two_nodes, ["script.py", "--flag"])

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

if not __package__:  # run as a script: the repository root is not on sys.path
    if sys.platform != "linux":
        sys.stderr.write(f"emulated_cluster.py: error: needs Linux, not {sys.platform}\n")
        sys.exit(2)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paro.distributed.user_errors import run_script
from paro.report.log import print_line
from paro.text import align
from tools.cluster.counters import Traffic, reset_traffic, traffic
from tools.cluster.launch import run
from tools.cluster.lifecycle import down, up
from tools.cluster.network import check_system
from tools.cluster.spec import ClusterSpec
from tools.cluster.state import open_cluster
from tools.shared.command_line import Parser
from tools.shared.output import print_json

DESCRIPTION = """\
Makes nodes out of network namespaces, with a NIC per rank (or one per node) whose speed the kernel
limits, and runs scripts in them under torchrun, with gloo. Needs Linux, root and iproute2.

  python tools/emulated_cluster.py up --nodes 2 --ranks-per-node 4 --inter 100mbit
  python tools/emulated_cluster.py run SCRIPT ARGS
  python tools/emulated_cluster.py bytes
  python tools/emulated_cluster.py down
"""


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="emulated_cluster.py", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(command: str, summary: str, details: str) -> argparse.ArgumentParser:
        added = commands.add_parser(command, help=summary, description=details)
        added.add_argument(
            "--name", default="default", help="of the cluster, where there are several"
        )
        return added

    making = add(
        "up", "make a cluster", "Makes a cluster. Rates are written as tc has them: 100mbit."
    )
    making.add_argument("--nodes", type=int, required=True, help="number of nodes")
    making.add_argument("--ranks-per-node", type=int, required=True, help="processes on each")
    making.add_argument("--inter", required=True, metavar="RATE", help="of each NIC, each way")
    making.add_argument(
        "--intra",
        metavar="RATE",
        help="of each rank inside its node: the loopback, which a node's ranks share, is limited "
        "to this times their number (default: as fast as the machine)",
    )
    making.add_argument(
        "--nic",
        choices=("per-rank", "shared"),
        default="per-rank",
        help="a NIC for each rank, or one for a node's ranks together (default: %(default)s)",
    )
    add(
        "run",
        "run a script on every rank",
        "Runs a script on every rank, under torchrun in every node, and returns the status of the "
        "first rank that failed. Ranks get GLOO_SOCKET_IFNAME, and OMP_NUM_THREADS=1 unless it is "
        "set. Node 0's output is shown as it is, lines of other nodes after their node's name.",
    ).add_argument(
        "argv", nargs=argparse.REMAINDER, metavar="[--] SCRIPT ARGS", help="a Python script"
    )
    counting = add(
        "bytes",
        "show what crossed the links",
        "Shows the bytes that crossed each NIC, headers included, as the kernel counted them since "
        "`up` or the last --reset.",
    )
    counting.add_argument("--json", action="store_true", help="print one JSON object")
    counting.add_argument("--reset", action="store_true", help="count from zero afterwards")
    add(
        "down",
        "remove a cluster",
        "Ends all processes in a cluster and removes it, also what a crash left of it.",
    )
    return parser


def table(measured: Traffic) -> str:
    """Return bytes that crossed the links, as text."""
    rows = [("", "sent", "received")]
    rows += [
        (f"node {nic.node} nic{nic.nic}", f"{nic.sent_bytes:,}", f"{nic.received_bytes:,}")
        for nic in measured.nics
    ]
    received = sum(nic.received_bytes for nic in measured.nics)
    rows.append(("all NICs", f"{measured.sent:,}", f"{received:,}"))
    rows += [
        (f"inside node {node}", f"{size:,}", "") for node, size in enumerate(measured.inside_bytes)
    ]
    return align(rows)


def execute(args: argparse.Namespace) -> None:
    check_system()
    if args.command == "up":
        sizes = {name: value for name, value in vars(args).items() if name != "command"}
        made = up(ClusterSpec(**sizes))
        print_line(f"cluster {made.spec.name!r} is up: {made.spec.describe()}")
    elif args.command == "run":
        argv = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
        sys.exit(run(open_cluster(args.name), argv))
    elif args.command == "bytes":
        opened = open_cluster(args.name)
        measured = traffic(opened)
        if args.json:
            print_json({"sent_bytes": measured.sent, **asdict(measured)})
        else:
            print_line(table(measured), whole=True)
        if args.reset:
            reset_traffic(opened)
    else:
        for namespace in down(args.name):
            print_line(f"left alone: {namespace}, which this tool did not make", stream=sys.stderr)
        print_line(f"cluster {args.name!r} is down")


def main(argv: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    try:
        execute(args)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    run_script("emulated_cluster.py", main)
