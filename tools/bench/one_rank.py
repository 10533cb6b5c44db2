"""Trains one real rank of many, without the others, on links that a machine file describes.

    python tools/bench/one_rank.py --ranks 128 --machine dgx-h100 --distributed-backend nccl \\
        --llama-preset 65B --seq-length 4096 --micro-batches 2 --recompute

It has a rank's shards, hooks, streams and allocator, under strategies of this project and FSDP2,
named as in tools/bench/compare_peers.py, whose other flags it takes. Collectives last as long as
the machine's links take for them; on a GPU they also move their bytes through memory and hold as
many thread blocks as NCCL's. What arrives is the rank's own, so losses mean nothing.

"exposed" is the share of a step that it is shorter without links, "host" the time of a step of
blocks that take the device no time. Not shown: congestion between ranks, slower ranks, memory of
communicators, NCCL's time on the host. Under torchrun each process is a rank for itself, so that
CPU ranks share processors as on one machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import median

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor

from data.loader import Batch
from paro.collectives.schedule import Op
from paro.distributed.control import Control
from paro.distributed.process_group import RuntimeConfig, device_for
from paro.distributed.timers import synchronize
from paro.distributed.user_errors import run_script
from paro.distributed.world import World, read_world
from paro.errors import UserError, check_least
from paro.launch.prediction import planned_step
from paro.machine.files import find_machine
from paro.machine.machine import Machine
from paro.measuring.benchmark import (
    MOST_REPEATS,
    CollectiveBenchmark,
    timed_collectives,
    zero_input,
)
from paro.report.log import print_line
from paro.topology import make_topology
from tools.bench import compare_peers
from tools.bench.link_model.links import Links
from tools.bench.link_model.process_group import alone
from tools.bench.peers.registry import build, is_own
from tools.bench.peers.run import backends_on, batches_of, in_own_process, rehearse
from tools.bench.peers.task import Contender, Task
from tools.shared.command_line import RankParser
from tools.shared.meters import MemoryMeter
from tools.shared.output import text_table, write_json

CONTENDERS = "paro:IIG,paro:NIG,paro:GGG,fsdp2,fsdp2-hybrid"
_SMALL, _RUNS = 4096, 5  # bytes of a collective that shows what the host takes, and its runs
_RANDOM = 1 << 20  # values that initial weights repeat
# Blocks so small that a GPU waits for the host.
_TINY = ["--hidden-size=64", "--num-attention-heads=4", "--ffn-hidden-size=64", "--vocab-size=512"]

Figures = dict[str, float]  # of a step in seconds, and GB


class LoneTask(Task):
    """A training job with initial weights that are quick to make."""

    is_alone = True

    def first_weights(self, name: str, begin: int, end: int) -> Tensor:
        count = end - begin
        return _random_values().repeat(-(-count // _RANDOM))[:count].to(self.compute_dtype).float()


@cache
def _random_values() -> Tensor:
    return torch.randn(_RANDOM, generator=torch.Generator().manual_seed(1)) * 0.02


def make_parser() -> argparse.ArgumentParser:
    parser = RankParser(description=__doc__)
    add = parser.add_argument
    add("--ranks", type=int, required=True, help="of the world, of which this process is one")
    add("--machine", required=True, metavar="NAME", help="a shipped machine, or a machine file")
    add("--contenders", default=CONTENDERS, metavar="NAMES", help=f"default {CONTENDERS}")
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    return parser


def run_contender(
    task: LoneTask, name: str, machine: Machine, *, are_free: bool = False
) -> Figures:
    """Train with one contender; empty if it does not fit in memory."""
    world, links = task.run.world, Links(machine, are_free=True)
    device = device_for(task.run.runtime, replace(world, local_rank=0))
    on_gpu = device.type == "cuda"
    torch.set_num_threads(1)  # a fork has no threads of its parent's OpenMP
    if on_gpu:
        torch.cuda.set_device(device)
    with alone(links):
        dist.init_process_group(
            backends_on(device), store=dist.HashStore(), rank=world.rank, world_size=world.size
        )
        # Steps with links, and as many without after one that ends what links delay.
        batches = batches_of(replace(task, steps=2 * task.steps + 1), device)
        if not on_gpu:
            rehearse(task.run, task.compute_dtype)
            links.host_seconds = host_seconds(Control(world, device), task.run.runtime)
        links.are_free = are_free
        memory = MemoryMeter(device)
        try:
            contender = build(task, name, Control(world, device))
            memory.start()
            _seconds_of_step(contender, batches, device, task.warmup_steps)
            memory.end_of_warmup()
            figures = {"s/step": _seconds_of_step(contender, batches, device, task.steps)}
            links.are_free = True
            _seconds_of_step(contender, batches, device, 1)
            figures["without links"] = _seconds_of_step(contender, batches, device, task.steps)
        except torch.OutOfMemoryError:
            return {}
        contender.finish()
    figures["peak GB"] = (memory.peak() or math.nan) / 1e9
    if on_gpu:
        figures["reserved GB"] = torch.cuda.max_memory_reserved(device) / 1e9
    return figures


def host_seconds(control: Control, runtime: RuntimeConfig) -> dict[Op, float]:
    """Return the processor time of this rank's own code in a collective that sends nothing, by op.

    A machine file counts it as part of a collective's.
    """
    size, group = control.world.size, control.world.group_size
    topology = make_topology(world_size=size, group_size=group, degrees=())
    benchmark = CollectiveBenchmark(
        control=control, topology=topology, runtime=runtime, algorithms=(), rounds=0
    )
    span = topology.axes[:1]
    seconds = {}
    with benchmark.collectives("native", frozenset({span})) as collectives:
        for op in Op:
            (timed,) = timed_collectives(op, span, [_SMALL], ranks=size)
            zeros = zero_input(timed, control.world.rank, control.device)
            runs = [benchmark.run(collectives, zeros, MOST_REPEATS) for _ in range(_RUNS)]
            seconds[op] = median(run.cpu_seconds for run in runs)
    return seconds


def _seconds_of_step(
    contender: Contender, batches: Iterator[Batch], device: torch.device, steps: int
) -> float:
    begin = time.perf_counter()
    outcomes = [contender.step(batches, lambda: None) for _ in range(steps)]
    synchronize(device)
    seconds = (time.perf_counter() - begin) / steps
    losses = [float(outcome.loss) for outcome in outcomes]
    assert all(map(math.isfinite, losses)), f"losses {losses}"
    return seconds


def measure(name: str, flags: Sequence[str], machine: Machine, world: World) -> Figures:
    """Return the figures of a contender, for a job by flags of compare_peers.py."""

    def job(*more: str) -> LoneTask:
        args = compare_peers.make_parser().parse_args([*flags, *more])
        task = compare_peers.task_of(args, name, world)
        return LoneTask(**{field: getattr(task, field) for field in Task.__slots__})

    task = job()
    figures = in_own_process(partial(run_contender, task, name, machine))
    host = in_own_process(partial(run_contender, job(*_TINY), name, machine, are_free=True))
    if figures:
        figures["exposed"] = 1.0 - figures["without links"] / figures["s/step"]
        figures["host s/step"] = host["s/step"]
    planned = planned_step(task.run)
    if planned is not None and is_own(name):
        figures["predicted s/step"] = planned.seconds["step"]
    return figures


def table(runs: dict[str, Figures]) -> str:
    """Return the text table: a row for every contender."""
    columns = ("s/step", "exposed", "host s/step", "peak GB", "reserved GB", "predicted s/step")
    return text_table(
        {"contender": name}
        | {key: f"{figures[key]:.3f}" if key in figures else "-" for key in columns}
        | {"": "" if "s/step" in figures else "does not fit"}
        for name, figures in runs.items()
    )


def main(argv: Sequence[str] | None = None) -> None:
    args, flags = make_parser().parse_known_args(argv)
    machine = find_machine(args.machine).for_world(args.ranks, subject="--machine")
    check_least(2, ranks=args.ranks)
    started = read_world()
    if started.size not in (1, args.ranks):
        raise UserError(f"--ranks {args.ranks}: torchrun started {started.size} processes")
    if "nccl" in flags and importlib.util.find_spec("triton") is None:
        raise UserError("--distributed-backend nccl needs Triton, which CUDA builds of torch bring")
    size = machine.group_size
    world = replace(started, size=args.ranks, group=size, ranks_per_node=size)
    flags += ["--group-size", str(size), "--paro-machine", args.machine]
    runs: dict[str, Figures] = {}
    for name in args.contenders.split(","):
        runs[name] = measure(name, flags, machine, world)
        if world.rank == 0:  # what is stopped keeps what it has
            print_line(f"{name}: {runs[name].get('s/step', math.nan):.3f} s/step")
            figures = {"ranks": args.ranks, "turns": runs}
            write_json(args.json, figures, is_update=len(runs) > 1)
    if world.rank == 0:
        print_line(table(runs))


if __name__ == "__main__":
    run_script("one_rank.py", main)
