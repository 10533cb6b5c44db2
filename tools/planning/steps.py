"""Times a training's steps under one strategy after another, on all ranks; a row for each."""

# Started by tools/study_plan.py in a cluster. Every strategy has processes of its own, forked from
# ones that have imported everything (tools/peers/turn.py says why), and trains steps of each number
# of micro-batches in them. A step's time is that between the ends of two steps, which all ranks
# come to at once, by the sum of their gradients' norms.

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

if not __package__:  # started as a script: the repository's packages lie beside tools/
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paro.arguments import parse_args
from paro.assembly import TORCH_TYPES, build_training, start_state
from paro.batch_schedule import BatchSchedule
from paro.config import RunConfig
from paro.runtime import Control, World, device_for, read_world, run_script, user_mistakes
from paro.training import StepResult, Training, train_step
from tools.collective_timing.device import same_batches
from tools.peers.meters import MemoryMeter
from tools.peers.own import parse_setting
from tools.peers.turn import in_own_process, process_group, rehearse

# Steps not timed, and then timed. A process that is new takes longer steps at first, up to a half
# for the first three and a tenth for the fifth, until malloc holds all that a step asks for.
OF_ONE = (5, 7)  # of one micro-batch
OF_SEVERAL = (2, 3)
_STAT = Path("/proc/stat")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Steps of one number of micro-batches, on one rank."""

    seconds: tuple[float, ...]
    cpu_seconds: float
    machine_seconds: float  # of processor time, of all programs and the kernel
    peak_bytes: int | None  # resident
    peak_in_use: int | None
    results: tuple[StepResult, ...]


def time_strategy(
    flags: Sequence[str], counts: Sequence[int], number: int, deadline: float
) -> tuple[list[dict[str, Any]], bool]:
    """The figures of one strategy, by number of micro-batches, and whether there is time for more.

    The same on every rank.
    """
    world = read_world()
    with user_mistakes():
        config = RunConfig.from_args(parse_args(flags), world)
        device = device_for(config.runtime, world)
    with process_group(config.runtime, world, device, number):
        control = Control(world, device)
        rehearse(config, TORCH_TYPES[config.precision.compute])
        memory = MemoryMeter(device)
        training = build_training(config, control)
        found = []
        for count in counts:
            resized = _with(training, config, world, count)
            timed = _time(resized, config, memory, OF_ONE if count == 1 else OF_SEVERAL)
            found.append(_row(control, count, timed))
            memory = memory.again()
        training.model.wait_published()
        return found, control.gather(time.monotonic() < deadline)[0]


def _machine_seconds() -> float:
    """Processor time that this machine has spent on anything since it was started."""
    user, nice, system, _, _, *interrupts = map(int, _STAT.read_text().split("\n")[0].split()[1:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def _with(training: Training, config: RunConfig, world: World, count: int) -> Training:
    """The same training with another number of micro-batches."""
    size = config.batches.micro_batch_size
    batches = BatchSchedule(
        micro_batch_size=size,
        global_batch_size=size * world.size * count,
        data_parallel_size=world.size,
    )
    return replace(training, batches=batches)


def _time(
    training: Training, config: RunConfig, memory: MemoryMeter, numbers: tuple[int, int]
) -> Timed:
    state, batches = start_state(config), same_batches(config, training.device)
    memory.start()
    warmup, steps = numbers
    for _ in range(warmup):
        train_step(training, state, batches)
    memory.end_of_warmup()
    ends, used, busy = [time.perf_counter()], time.process_time(), _machine_seconds()
    results = []
    for _ in range(steps):
        results.append(train_step(training, state, batches))
        ends.append(time.perf_counter())
    return Timed(
        seconds=tuple(after - before for before, after in pairwise(ends)),
        cpu_seconds=(time.process_time() - used) / steps,
        machine_seconds=(_machine_seconds() - busy) / steps,
        peak_bytes=memory.peak(),
        peak_in_use=memory.peak_in_use(),
        results=tuple(results),
    )


def _row(control: Control, count: int, timed: Timed) -> dict[str, Any]:
    """All ranks' figures as one."""
    by_rank: list[Timed] = control.gather(timed)
    steps = [max(step) for step in zip(*(rank.seconds for rank in by_rank), strict=True)]
    exposed = [result.exposed for result in timed.results]
    resident = [rank.peak_bytes for rank in by_rank if rank.peak_bytes is not None]
    in_use = [rank.peak_in_use for rank in by_rank if rank.peak_in_use is not None]
    return {
        "micro_batches": count,
        "seconds": median(steps),
        "seconds_by_step": steps,
        "cpu_seconds": fmean(rank.cpu_seconds for rank in by_rank),
        "machine_seconds": max(rank.machine_seconds for rank in by_rank),
        "peak_bytes": max(resident, default=None),
        "peak_in_use": max(in_use, default=None),
        "exposed": {
            kind: fmean(getattr(one, kind) for one in exposed)
            for kind in ("gather", "reduce", "publish")
        },
        "agreement": fmean(r.own.agreement for rank in by_rank for r in rank.results),
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="FILE", help="a JSON line is added per row")
    add("--label", type=json.loads, default={}, metavar="JSON", help="fields of every row")
    add(
        "--settings", required=True, help="STRATEGY@COLLECTIVE[+rotate|+in-place], joined by commas"
    )
    add("--counts", required=True, help="numbers of micro-batches, joined by commas")
    add("--seconds", type=float, default=1e9, help="begin no strategy after so many")
    add("--train", required=True, metavar="FLAGS", help="of pretrain_llama.py")
    return parser


def main() -> None:
    begin = time.monotonic()
    args = make_parser().parse_args()
    world = read_world()
    counts = [int(word) for word in args.counts.split(",")]
    for number, setting in enumerate(args.settings.split(",")):
        with user_mistakes():
            flags = [*args.train.split(), *parse_setting(setting).flags]
        turn = partial(time_strategy, flags, counts, number, begin + args.seconds)
        found, goes_on = in_own_process(turn)
        if world.rank == 0:
            label = {**args.label, "setting": setting}
            with args.output.open("a", encoding="utf-8") as rows:
                rows.writelines(json.dumps({**label, **row}) + "\n" for row in found)
            told = ", ".join(f"{row['micro_batches']}: {row['seconds']:.3f} s" for row in found)
            print(f"{setting}  {told}", flush=True)
        if not goes_on:
            break


if __name__ == "__main__":
    run_script("steps.py", main)
