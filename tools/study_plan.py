"""Measures strategies in a cluster and sets the planner's predictions beside them.

    python tools/emulated_cluster.py run -- tools/bench_collectives.py --algorithms native \\
        --dtype bfloat16 --inter-bandwidth 100mbit --machine-file machine.json
    python tools/emulated_cluster.py run -- tools/study_plan.py --paro-machine machine.json \\
        --strategies NNG,IIG,GGG --json study.json

First every rank trains alone, which tells how fast it computes beside the others; then every
strategy has its turns on all ranks. Without --strategies these are the 14 of letters. For a study
of two shapes and 1 and 4 micro-batches run it four times, in clusters with either kind of NICs.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

if not __package__:  # started as a script: the repository's packages lie beside tools/
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.atomic_file import replacing
from paro.planning.machine_file import find_machine
from paro.runtime import World, read_world, run_script, user_mistakes
from paro.strategy import legal_letters
from tools.compare_peers import make_parser as make_peers_parser
from tools.compare_peers import task_of
from tools.peers.figures import order_of_round
from tools.peers.task import Task
from tools.peers.turn import in_own_process, take_turn
from tools.planning.measurement import Alone, case_of, compare, machine_for, train_alone


def main() -> None:
    with user_mistakes():
        parser = make_peers_parser()
        parser.description, _, parser.epilog = (__doc__ or "").partition("\n\n")
        parser.add_argument("--paro-machine", required=True, metavar="FILE")
        parser.add_argument("--paro-collective", default="native")
        parser.add_argument("--strategies", default=",".join(legal_letters()), metavar="NAMES")
        parser.add_argument("--cores", type=float, help="of a rank; default: this machine's share")
        args = parser.parse_args()
        world = read_world()
        task = task_of(args, world)
        machine = find_machine(args.paro_machine)
        here = world.size, task.group_size
        if (machine.world_size, machine.group_size) != here:
            raise ValueError(
                f"--paro-machine {args.paro_machine} is of {machine.world_size} ranks in groups of "
                f"{machine.group_size}, these are {here[0]} in groups of {here[1]}"
            )
        if args.json is not None and not args.json.absolute().parent.is_dir():
            raise ValueError(f"--json {args.json}: there is no such folder")
    names = args.strategies.split(",")
    alone = in_own_process(partial(train_alone, task, steps=max(3, args.steps)))
    turns = measure(task, names, world, rounds=args.rounds, collective=args.paro_collective)
    if world.rank == 0:
        cores = args.cores or (os.cpu_count() or 1) / world.size
        planned = machine_for(machine, task, alone, cores=cores)
        found = compare(case_of(task, planned, args.paro_collective), turns)
        report(found, alone)
        if args.json is not None:
            text = json.dumps({"arguments": {k: str(v) for k, v in vars(args).items()}, **found})
            with replacing(args.json) as temporary:
                temporary.write_text(text + "\n", encoding="utf-8")


def measure(
    task: Task, names: list[str], world: World, *, rounds: int, collective: str
) -> dict[str, tuple[float, int | None]]:
    """Seconds and peak bytes of every strategy, medians over rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    peaks: dict[str, list[int]] = {name: [] for name in names}
    number = 0
    for index in range(rounds):
        for name in order_of_round(names, index):
            number += 1
            contender = f"paro:{name.replace(',', '/')}@{collective}"
            turn = in_own_process(partial(take_turn, task, contender, world, number=number))
            seconds[name].append(turn.seconds)
            peaks[name] += [] if turn.peak_bytes is None else [turn.peak_bytes]
            if world.rank == 0:
                print(f"round {index + 1} {name}: {turn.seconds:.3f} s/step", flush=True)
    return {
        name: (median(seconds[name]), round(median(peaks[name])) if peaks[name] else None)
        for name in names
    }


def report(found: dict[str, Any], alone: Alone) -> None:
    """The table for people."""
    print(f"\nalone: {alone.seconds:.3f} s/step, {alone.micro_batch_seconds:.3f} s/micro-batch")
    print("strategy  measured  predicted   error   peak MB  predicted MB")
    for row in found["rows"]:
        peak = "-" if row["measured_bytes"] is None else f"{row['measured_bytes'] / 1e6:.1f}"
        print(
            f"{row['strategy']:8} {row['measured_seconds']:9.3f} {row['predicted_seconds']:10.3f} "
            f"{row['error']:+7.1%} {peak:>9} {row['predicted_bytes'] / 1e6:13.1f}"
        )
    print(f"median error {found['median_error']:.1%}, worst {found['worst_error']:.1%}")
    print(f"pairs wrongly ordered: {len(found['pairs_wrong'])} of {found['pairs']}")
    for row in found["auto"]:
        print(
            f"auto under {row['limit_bytes'] / 1e6:.1f} MB: {row['chosen']}, "
            f"{row['beside_best']:.2f} of the best that fits"
        )


if __name__ == "__main__":
    run_script("study_plan.py", main)
