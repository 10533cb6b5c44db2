"""Times a training's steps under all strategies, in turns, on all ranks; a row for each turn."""

# Started by tools/bench/study_plan.py in a cluster. Hosts have other guests, which slow cores and
# memory down by a fifth for minutes: so all strategies are built in the same processes and take
# turns of a few steps, for several rounds, and turns of one round are comparable. They share
# process groups, because every gloo group that merely exists takes processor time. A step's time is
# the time between the ends of two steps, which all ranks reach together, because they reduce the
# norms of their gradients.

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any
from unittest.mock import patch

import psutil
import torch.distributed as dist

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from data.loader import Batch
from paro.arguments.parser import parse_args
from paro.config.run import RunConfig, configure
from paro.distributed.control import Control
from paro.distributed.process_group import device_for
from paro.distributed.user_errors import run_script
from paro.distributed.world import World, read_world
from paro.measuring.device import same_batches
from paro.sharding.buffers import TORCH_TYPES
from paro.training.assembly import build_training
from paro.training.step import StepResult, Training, TrainState, train_step
from tools.bench.peers.own import parse_setting
from tools.bench.peers.run import in_own_process, process_group, rehearse
from tools.shared.command_line import RankParser
from tools.shared.meters import MemoryMeter

# Steps of a turn, (untimed, timed). In the untimed steps malloc and caches still hold another
# candidate's data; the first also does not wait for an all-gather of updated parameters.
OF_ONE = (2, 3)  # with one micro-batch
OF_SEVERAL = (1, 2)
VISITS = 3  # turns of one micro-batch for each of several: short steps vary more
WARMUP = 2  # steps per number of micro-batches once a strategy is built; memory is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """The steps of a turn, on one rank."""

    seconds: tuple[float, ...]
    cpu_seconds: float
    machine_seconds: float  # processor time of all programs and the kernel
    results: tuple[StepResult, ...]


@dataclass(slots=True, kw_only=True)
class Contender:
    """A strategy with a number of micro-batches per step, built and warmed up."""

    candidate: str
    num_micro_batches: int
    training: Training
    state: TrainState
    batches: Iterator[Batch]
    peak_in_use: int | None

    def take_turn(self) -> Timed:
        warmup, steps = OF_ONE if self.num_micro_batches == 1 else OF_SEVERAL
        for _ in range(warmup):
            self.step()
        ends, used, busy = [time.perf_counter()], time.process_time(), _machine_seconds()
        results = []
        for _ in range(steps):
            results.append(self.step())
            ends.append(time.perf_counter())
        timed = Timed(
            seconds=tuple(after - before for before, after in pairwise(ends)),
            cpu_seconds=(time.process_time() - used) / steps,
            machine_seconds=(_machine_seconds() - busy) / steps,
            results=tuple(results),
        )
        self.training.model.wait_for_updated_params()
        return timed

    def step(self) -> StepResult:
        return train_step(self.training, self.state, self.batches)


class SharedGroups:
    """Groups of the trainings of a process that take turns; none of them may be closed.

    In one training every group has a purpose of its own, also where two have the same ranks. So a
    training gets the first, second, .. group of some ranks where it asks for the first, second, ..
    """

    def __init__(self) -> None:
        self._made: dict[tuple[Sequence[int], int], dist.ProcessGroup] = {}

    @contextmanager
    def one_training(self) -> Iterator[None]:
        """Share process groups of trainings built in the block; all ranks build in one order."""
        make = dist.new_group
        num_asked: Counter[Sequence[int]] = Counter()

        def shared(ranks: list[int], **settings: Any) -> dist.ProcessGroup:
            members = tuple(ranks)
            key = members, num_asked[members]
            num_asked[members] += 1
            if key not in self._made:
                self._made[key] = make(ranks, **settings)
            return self._made[key]

        with patch.object(dist, "new_group", shared):
            yield


def time_settings(args: argparse.Namespace, world: World) -> None:
    """Build all candidates and times them in turns; rank 0 writes a row for each turn."""
    begin = time.monotonic()
    configs = {}
    for candidate in args.settings.split(","):
        flags = [*args.train.split(), *parse_setting(candidate).flags]
        configs[candidate] = configure(parse_args(flags), world)
    first = next(iter(configs.values()))
    device = device_for(first.runtime, world)
    counts = [int(word) for word in args.counts.split(",")]
    with process_group(first.runtime, world, device, 0):
        control = Control(world, device)
        rehearse(first, TORCH_TYPES[first.precision.compute])
        groups = SharedGroups()
        contenders = [
            contender
            for candidate, config in configs.items()
            for contender in _built(candidate, config, control, counts, groups)
        ]
        for turn in range(1, args.turns + 1):
            rows = [
                row
                for visit in range(VISITS if 1 in counts else 1)
                for row in _turn_of_all(control, contenders, turn, visit)
            ]
            if world.rank == 0:
                _write(args.output, [args.label | row for row in rows])
                print(f"turn {turn} of {args.turns}, {len(rows)} rows", flush=True)
            if control.gather(time.monotonic() - begin > args.seconds)[0]:
                break


def _turn_of_all(
    control: Control, contenders: Sequence[Contender], turn: int, visit: int
) -> Iterator[dict[str, Any]]:
    """Yield a row per contender; several micro-batches only in the first visit."""
    order = [
        contender for contender in contenders if visit == 0 or contender.num_micro_batches == 1
    ]
    Random(VISITS * turn + visit).shuffle(order)
    for contender in order:
        short = contender.num_micro_batches == 1
        number = VISITS * (turn - 1) + visit + 1 if short else turn
        yield _row(control, contender, contender.take_turn()) | {"turn": number}


def _built(
    candidate: str,
    config: RunConfig,
    control: Control,
    counts: Sequence[int],
    groups: SharedGroups,
) -> Iterator[Contender]:
    memory = MemoryMeter(control.device)
    with groups.one_training():
        training = build_training(config, control)
    for count in counts:
        contender = Contender(
            candidate=candidate,
            num_micro_batches=count,
            training=_with(training, config, count),
            state=TrainState.at_start(config.loss_scale),
            batches=same_batches(config.spec, control.device),
            peak_in_use=None,
        )
        memory.start()
        for _ in range(WARMUP):
            contender.step()
        memory.end_of_warmup()
        training.model.wait_for_updated_params()
        contender.peak_in_use = memory.peak_in_use()
        memory = memory.again()
        yield contender


def _machine_seconds() -> float:
    """Return the processor time that this machine has spent on anything since it was booted."""
    used = psutil.cpu_times()
    return float(used.user + used.nice + used.system + used.irq + used.softirq)


def _with(training: Training, config: RunConfig, count: int) -> Training:
    """Return the training with another number of micro-batches."""
    size = config.batches.samples_per_micro_batch * count
    return replace(training, batches=replace(config.batches, global_batch_size=size))


def _row(control: Control, contender: Contender, timed: Timed) -> dict[str, Any]:
    """Combine all ranks' figures into one row."""
    by_rank: list[Timed] = control.gather(timed)
    steps = [max(step) for step in zip(*(rank.seconds for rank in by_rank), strict=True)]
    exposed = [result.exposed for result in timed.results]
    in_use: list[int | None] = control.gather(contender.peak_in_use)
    return {
        "setting": contender.candidate,
        "micro_batches": contender.num_micro_batches,
        "seconds": median(steps),
        "cpu_seconds": fmean(rank.cpu_seconds for rank in by_rank),
        "machine_seconds": max(rank.machine_seconds for rank in by_rank),
        "peak_in_use": max((peak for peak in in_use if peak is not None), default=None),
        "exposed": {
            kind: fmean(getattr(one, kind) for one in exposed)
            for kind in ("gather", "reduce", "publish")
        },
    }


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


def main() -> None:
    parser = RankParser(description=__doc__)
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="FILE", help="a JSON line is added per row")
    add("--label", type=json.loads, default={}, metavar="JSON", help="fields of every row")
    add(
        "--settings",
        required=True,
        help="STRATEGY@COLLECTIVE[+rotate|+in-place|+4-bit],...",
    )
    add("--counts", required=True, help="numbers of micro-batches, joined by commas")
    add("--turns", type=int, required=True, help="of every setting")
    add("--seconds", type=float, default=1e9, help="begin no turn after so many")
    add("--train", required=True, metavar="FLAGS", help="of pretrain_llama.py")
    in_own_process(partial(time_settings, parser.parse_args(), read_world()))


if __name__ == "__main__":
    run_script("steps.py", main)
