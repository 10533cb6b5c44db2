"""Times collectives by every algorithm, checks every result, and writes a machine file."""

# Bandwidths are in bytes per second, as nccl-tests defines them (its doc/PERFORMANCE.md): the
# algorithm bandwidth is the whole buffer (a gather's output, a reduce-scatter's input) by the time;
# the bus bandwidth is that times (n - 1) / n on n ranks, or 2 (n - 1) / n for an all-reduce: what
# each rank of one flat ring sends. The bound is machine.py's `least_seconds`; where a token bucket
# shapes a link, small messages may beat it, because the bucket permits a burst.

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paro.collectives.schedule import COLLECTIVES, NCCL_COLLECTIVES, Op
from paro.config.run import RunConfig
from paro.distributed.control import Control
from paro.distributed.process_group import RuntimeConfig, distributed
from paro.distributed.user_errors import run_script
from paro.distributed.world import World, read_world
from paro.errors import UserError, about, check_least
from paro.machine.files import machine_to_json, read_machine
from paro.machine.machine import (
    BandwidthSource,
    Device,
    LinkSpeed,
    Machine,
    Nic,
    bits_per_second,
    least_seconds,
    passes,
    rate_text,
)
from paro.measuring.benchmark import (
    CollectiveBenchmark,
    CollectiveResult,
    TimedCollective,
    timed_collectives,
    with_measured,
)
from paro.measuring.device import measure_device
from paro.measuring.memory import with_communicators
from paro.report.log import print_line
from paro.topology import AxisSpan, Link, Topology, axes_of, make_topology
from tools.collective_timing.results import describe, memory_line, plot, table, written_lines
from tools.collective_timing.rounds import run_rounds
from tools.collective_timing.training import LARGE, SMALL, training_config
from tools.shared.command_line import RankParser, add_trainer_flags
from tools.shared.output import write_json, write_text
from tools.shared.picture import check_outputs

DESCRIPTION = """\
Times all-gather, reduce-scatter and all-reduce of the whole world by several algorithms, and checks
every result. The exit status is 1 if one was wrong.

  torchrun --nproc-per-node 4 tools/bench_collectives.py --group-size 2 --json rows.json
"""
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PREFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The checked flags."""

    ops: tuple[Op, ...]
    algorithms: tuple[str, ...]
    sizes: tuple[int, ...]  # in bytes
    machine: Machine  # this world; its links hold what is known before the measurement
    topology: Topology
    runtime: RuntimeConfig
    args: argparse.Namespace  # dtype, rounds and files as they were given
    trained: RunConfig | None = None  # the training that times the device of a machine file

    def collectives(self, op: Op, span: AxisSpan) -> list[TimedCollective]:
        """Make one collective per size."""
        dtype, ranks = TYPES[self.args.dtype], self.topology.world_size
        return timed_collectives(op, span, self.sizes, ranks=ranks, dtype=dtype)


def make_parser() -> argparse.ArgumentParser:
    parser = RankParser(description=DESCRIPTION)
    add = parser.add_argument
    ops = ",".join(op.value for op in Op)
    names = ",".join(COLLECTIVES)
    sizes = "4K,16K,64K,256K,1M,4M,16M,32M"
    add("--ops", default=ops, help=f"default {ops}")
    add("--algorithms", help=f"default {names}; under nccl {','.join(NCCL_COLLECTIVES)}")
    add("--sizes", default=sizes, help=f"bytes of the whole buffer, M is 10^6; default {sizes}")
    add("--group-size", type=int, help="ranks joined by fast links; default: ranks per node")
    add("--dtype", choices=TYPES, default="float32", help="default float32")
    add("--rounds", type=int, default=5, help="turns of each algorithm that count; default 5")
    add("--distributed-backend", choices=("nccl", "gloo"), help="default: nccl if there are GPUs")
    add_trainer_flags(parser, "paro_nccl_launch_order", "paro_nccl_copy_engine")
    add("--inter-bandwidth", metavar="RATE", help="of each NIC, for the bound: 100mbit, 25gbit")
    add("--intra-bandwidth", metavar="RATE", help="of each rank's link inside its group")
    add("--nic", choices=[nic.value for nic in Nic], help="a group's NICs; default per-rank")
    add("--paro-machine", type=Path, metavar="FILE", help="take links that no flag gives from it")
    add(
        "--machine-file",
        type=Path,
        metavar="OUT",
        help="time all axes alone too, and a model on every rank alone, and write a machine",
    )
    add("--train", metavar="FLAGS", help=f"that model: of pretrain_llama.py; on CPUs {SMALL}")
    add("--plot", type=Path, metavar="FILE.png", help="draw bandwidth over size")
    add("--json", type=Path, metavar="FILE", help="write the rows; bandwidths in bytes per second")
    return parser


def settings_of(args: argparse.Namespace, world: World) -> Settings:
    """Return the settings; `UserError` for mistakes of the user."""
    if world.size == 1:
        raise UserError(
            "one process has no peer: start several, such as torchrun "
            "--nproc-per-node 4 tools/bench_collectives.py --group-size 2"
        )
    group_size = world.ranks_per_node if args.group_size is None else args.group_size
    if group_size < 1 or world.size % group_size != 0:
        raise UserError(f"--group-size {group_size} does not divide the {world.size} ranks")
    check_least(1, rounds=args.rounds)
    check_outputs(args, "--json", "--machine-file", pictures=["--plot"])
    backend = args.distributed_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    possible = NCCL_COLLECTIVES if backend == "nccl" else COLLECTIVES
    return Settings(
        ops=tuple(map(Op, chosen("--ops", args.ops, [op.value for op in Op]))),
        algorithms=chosen("--algorithms", args.algorithms or ",".join(possible), possible),
        sizes=tuple(map(size_of, args.sizes.split(","))),
        machine=known_machine(args, world.size, group_size),
        topology=make_topology(world_size=world.size, group_size=group_size, degrees=()),
        runtime=RuntimeConfig(
            distributed_backend=backend,
            paro_nccl_launch_order=args.paro_nccl_launch_order,
            paro_nccl_copy_engine=args.paro_nccl_copy_engine,
        ),
        args=args,
        trained=trained(args, backend),
    )


def trained(args: argparse.Namespace, backend: str) -> RunConfig | None:
    """Return the training that times a machine file's device; None where no file is written."""
    if args.machine_file is None:
        return None
    with about("--train: "):
        return training_config(args.train or (LARGE if backend == "nccl" else SMALL), backend)


def chosen(flag: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise UserError(f"{flag} {name!r} is none of {', '.join(known)}")
    return names


def size_of(text: str) -> int:
    """Return bytes of `4096`, `64K` or `1.5M`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text.strip().upper())
    size = round(Decimal(match[1]) * PREFIXES[match[2]]) if match else 0
    if size < 1:
        raise UserError(f"--sizes {text!r} is no size: write it as 4096, 64K or 1.5M")
    return size


def known_machine(args: argparse.Namespace, world_size: int, group_size: int) -> Machine:
    """Make this world with links given by flags and --paro-machine; flags take precedence."""
    machine = Machine(
        name=args.machine_file.stem if args.machine_file else "this",
        source="",
        world_size=world_size,
        group_size=group_size,
    )
    if args.paro_machine is not None:
        other = read_machine(args.paro_machine)
        machine = replace(machine, nic=other.nic, intra=other.intra, inter=other.inter)
    if args.nic is not None:
        machine = replace(machine, nic=Nic(args.nic))
    speeds: dict[str, Any] = {}
    for link in Link:
        text = getattr(args, f"{link.value}_bandwidth")
        with about(f"--{link.value}-bandwidth: "):
            if text is not None:
                speeds[link.value] = LinkSpeed(
                    bandwidth=rate_text(bits_per_second(text)),
                    latency_seconds=0.0,
                    bandwidth_source=BandwidthSource.TYPED,
                )
    return replace(machine, **speeds)


def run_all(settings: Settings, control: Control) -> list[CollectiveResult]:
    """Time the axis span of the whole world; for a machine file, first every axis alone too."""
    benchmark = CollectiveBenchmark(
        control=control,
        topology=settings.topology,
        runtime=settings.runtime,
        algorithms=settings.algorithms,
        rounds=settings.args.rounds,
        machine=settings.machine,
        while_computing=settings.args.machine_file is not None and control.device.type == "cpu",
    )
    axes = settings.topology.axes
    alone = [(axis,) for axis in axes] if settings.args.machine_file and len(axes) > 1 else []
    results: list[CollectiveResult] = []
    for span in (*alone, axes):
        for op in settings.ops:
            finished = run_rounds(benchmark, settings.collectives(op, span))
            if control.world.rank == 0:
                print_line(table([row_of(result, settings) for result in finished]))
            results += finished
    return results


def row_of(result: CollectiveResult, settings: Settings) -> dict[str, Any]:
    """Return one op, algorithm and size, as a row of --json."""
    timed = result.collective
    axes = axes_of(timed.span)
    ranks = timed.span[-1].outer // timed.span[0].inner
    algorithm_bandwidth = timed.num_bytes / result.seconds
    bound = least_seconds(settings.machine, timed.op, axes, timed.num_bytes)
    return {
        "op": timed.op.value,
        "algorithm": result.algorithm,
        "axes": axes.value,
        "ranks": ranks,
        "bytes": timed.num_bytes,
        "seconds": result.seconds,
        "algorithm_bandwidth": algorithm_bandwidth,
        "bus_bandwidth": algorithm_bandwidth * passes(timed.op) * (ranks - 1) / ranks,
        "correct": result.correct,
        "bound_seconds": bound,
        "fraction_of_bound": None if bound is None else bound / result.seconds,
        "repeats": result.repeats,
        "seconds_by_round": result.seconds_by_round,
    }


def conditions(settings: Settings, control: Control) -> dict[str, Any]:
    """Return the conditions under which the rows were measured."""
    machine, device = settings.machine, control.device
    on_gpu = device.type == "cuda"
    links = {link.value: machine.link(link) for link in Link}
    return {
        "world_size": machine.world_size,
        "group_size": machine.group_size,
        "nodes": -(-machine.world_size // control.world.ranks_per_node),
        "nic": machine.nic.value,
        **{
            f"{name}_bandwidth": None if speed is None else rate_text(speed.bits_per_second)
            for name, speed in links.items()
        },
        "dtype": settings.args.dtype,
        "backend": settings.runtime.distributed_backend,
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "torch": torch.__version__,
        "rounds": settings.args.rounds,
    }


def measured_device(settings: Settings, control: Control) -> Device | None:
    """Time the device of a rank, and measure the memory of its context and communicators."""
    if settings.trained is None:
        return None
    timed = measure_device(settings.trained, control, group_size=settings.machine.group_size)
    return with_communicators(timed, control, settings.topology, settings.runtime)


def write(
    settings: Settings,
    results: Sequence[CollectiveResult],
    facts: dict[str, Any],
    device: Device | None,
) -> None:
    """Write the requested files."""
    world = axes_of(settings.topology.axes).value
    rows = [row_of(result, settings) for result in results]
    of_world = [row for row in rows if row["axes"] == world]
    alone = [row for row in rows if row["axes"] != world]
    write_json(settings.args.json, {**facts, "rows": of_world, "axis_rows": alone})
    if settings.args.machine_file is not None:
        source = f"measured by tools/bench_collectives.py: {describe(facts)}"
        machine = with_measured(settings.machine, results, device, source=source)
        write_text(settings.args.machine_file, machine_to_json(machine))
        print_line(*written_lines(settings.args.machine_file, machine))
    if settings.args.plot is not None:
        plot(settings.args.plot, describe(facts), of_world)


def main(argv: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    world = read_world()
    settings = settings_of(args, world)
    with distributed(settings.runtime, world) as control:
        facts = conditions(settings, control)
        if world.rank == 0:
            print_line(describe(facts))
        device = measured_device(settings, control)
        if device is not None and world.rank == 0:
            print_line(memory_line(device))
        results = run_all(settings, control)
        with control.raise_on_all_ranks():
            if world.rank == 0:
                write(settings, results, facts, device)
    wrong = [result for result in results if not result.correct]
    if wrong:
        if world.rank == 0:
            print_line(f"{len(wrong)} of {len(results)} rows are wrong", stream=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    run_script("bench_collectives.py", main)
