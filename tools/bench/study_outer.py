"""Trains a small model synchronously and with outer steps, and compares held-out losses."""

# A training is a process for each group, of one rank, in fp32; groups share the batch, and all
# trainings but `alone` see the same tokens. Learning rates are swept, of synchronous training and
# of outer steps each, since these bear other rates; then one setting of outer steps is changed at a
# time. The best one is trained half and twice as long, too, as the gap depends on the length. All
# held-out samples are read by every evaluation.

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paro.distributed.user_errors import run_script
from paro.errors import check_least
from paro.report.log import print_line
from tools.bench.shared.trainings import QUICKSTART, Finished, data_flags, run_all
from tools.bench.study_optimizers import FLAGS, LEAST_RATE, MUON, SEEDS
from tools.shared.command_line import Parser
from tools.shared.output import markdown_table, write_text

DESCRIPTION = """\
Compares synchronous training with groups that train alone and synchronize every H steps
(--paro-outer-steps), on the quickstart's text (make quickstart): learning rates swept, then one
setting at a time, the most important ones with three seeds, and four with half and twice as many
steps. --folder gets runs.json, to which every training is added, so that a study can be stopped and
continued, and report.md.

  python tools/bench/study_outer.py --folder runs/outer
"""
BATCH = 16  # samples a step, of all groups together
RATES = tuple(1e-3 * 2**step for step in range(-3, 5))
FIRST_RATES = RATES[3:6]  # tried; where the best one is at an edge, its neighbour is tried too
LENGTHS = (0.5, 1.0, 2.0)  # of --train-iters


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A way to train; groups of one rank each, or one process with `part` of the batch."""

    name: str
    groups: int = 1
    part: float = 1.0  # of the batch, without the samples of other groups
    outer: dict[str, float] = field(default_factory=dict, hash=False)  # {flag: value}; none: no
    flags: str = ""
    rates_of: str = ""  # name of the case whose best rate is taken; empty: rates are swept
    seeds: int = 1

    def words(self, lr: float, seed: int, iterations: int, interval: int) -> list[str]:
        """Return the arguments of Python for a training."""
        ranks = self.groups if self.outer else 1
        batch = round(BATCH * self.part)
        launch = "pretrain_llama.py"
        if ranks > 1:
            launch = f"-m torch.distributed.run --standalone --nproc-per-node {ranks} {launch}"
        own = FLAGS.replace("--micro-batch-size 8", f"--micro-batch-size {batch // ranks}")
        own = own.replace("--global-batch-size 8", f"--global-batch-size {batch}")
        own += f" --lr {lr:g} --min-lr {LEAST_RATE * lr:g} --seed {seed} --train-iters {iterations}"
        own += f" --eval-interval {interval} {self.flags}"
        if self.outer:
            own += " --paro-group-size 1 --paro-strategy NNN"
            own += "".join(f" --paro-outer-{name} {value:g}" for name, value in self.outer.items())
        return f"{launch} {own}".split()


def outer_case(
    name: str, groups: int = 2, *, seeds: int = 1, flags: str = "", **changes: float
) -> Case:
    """Return a case of outer steps, which differs from the first one by `changes`."""
    base = {"steps": 16.0, "lr": 0.8, "momentum": 0.9, "warmup": 100.0, "bits": 16.0, "delay": 0.0}
    muon = " Muon" if flags else ""
    return Case(
        name=name,
        groups=groups,
        outer=base | changes,
        flags=flags,
        rates_of="" if name == FIRST else f"{SYNCHRONOUS}{muon}" if flags else FIRST,
        seeds=seeds,
    )


FIRST, FOUR = "2 groups, H 16", "4 groups, H 16"
SYNCHRONOUS, ALONE = "synchronous", "one group alone, half the batch"
OUTER_RATE = "2 groups, outer rate"
CASES = (
    Case(name=SYNCHRONOUS, seeds=3),
    Case(name=ALONE, part=0.5, rates_of=SYNCHRONOUS, seeds=3),
    outer_case(FIRST, seeds=3),
    outer_case("2 groups, without warm-up", warmup=0),
    outer_case(FOUR, 4, seeds=3),
    outer_case("2 groups, 4 bits", bits=4, seeds=3),
    outer_case("2 groups, delay 2", delay=2),
    outer_case("2 groups, H 8", steps=8),
    outer_case("2 groups, H 32", steps=32),
    *(
        outer_case(f"{OUTER_RATE} {lr:g}, momentum {momentum:g}", lr=lr, momentum=momentum)
        for lr in (0.6, 0.8, 1.0)
        for momentum in (0.0, 0.5, 0.9)
        if (lr, momentum) != (0.8, 0.9)
    ),
    Case(name=f"{SYNCHRONOUS} Muon", flags=MUON.flags),
    outer_case("2 groups, Muon", flags=MUON.flags),
)


@dataclass(frozen=True, slots=True)
class Job:
    """A training: a case with its learning rate, seed, and part of the steps."""

    case: Case
    lr: float
    seed: int
    length: float = 1.0  # of --train-iters

    @property
    def name(self) -> str:
        steps = "" if self.length == 1.0 else f", {self.length:g} times the steps"
        return f"{self.case.name}, learning rate {self.lr:g}, seed {self.seed}{steps}"


def sweep(name: str, finished: Finished) -> dict[float, float]:
    """Return the held-out losses of a case with the first seed, by learning rate."""
    (case,) = (each for each in CASES if each.name == name)
    names = {lr: Job(case, lr, SEEDS[0]).name for lr in RATES}
    return {lr: finished[job].last for lr, job in names.items() if job in finished}


def rates_to_try(name: str, finished: Finished) -> list[float]:
    """Return the learning rates of a case's sweep so far, with the neighbours of the best one."""
    losses = sweep(name, finished)
    if not losses.keys() >= set(FIRST_RATES):
        return [*FIRST_RATES]
    at = RATES.index(min(losses, key=losses.__getitem__))
    return sorted({*losses, *RATES[max(0, at - 1) : at + 2]})


def best_rate(case: Case, finished: Finished) -> float | None:
    """Return the learning rate of a case; None until its sweep is complete."""
    name = case.rates_of or case.name
    losses = sweep(name, finished)
    is_complete = losses.keys() >= set(rates_to_try(name, finished))
    return min(losses, key=losses.__getitem__) if is_complete else None


def jobs_for(finished: Finished) -> list[Job]:
    """Return the jobs in order, of the first seed first, but for those that wait for a sweep."""
    jobs: list[Job] = []
    for number, seed in enumerate(SEEDS):
        for case in CASES:
            if number == 0 and not case.rates_of:
                jobs += [Job(case, lr, seed) for lr in rates_to_try(case.name, finished)]
            lr = best_rate(case, finished)
            if lr is not None and number < case.seeds:
                jobs.append(Job(case, lr, seed))
        if number == 0:
            jobs += [job for case in of_all_lengths(finished) for job in lengths_of(case, finished)]
    return list(dict.fromkeys(jobs))


def of_all_lengths(finished: Finished) -> list[Case]:
    """Return the cases that are trained with all numbers of steps, the best outer rate's too."""
    swept = [case for case in CASES if case.name == FIRST or case.name.startswith(OUTER_RATE)]
    losses = {case: _of_seeds(case, finished).get(SEEDS[0], math.nan) for case in swept}
    is_swept = not any(map(math.isnan, losses.values()))
    best = [min(swept, key=losses.__getitem__)] if is_swept else []
    return [*(case for case in CASES if case.name in (SYNCHRONOUS, ALONE, FOUR)), *best]


def lengths_of(case: Case, finished: Finished) -> list[Job]:
    """Return the trainings of a case with the first seed, by length; none before its sweep."""
    lr = best_rate(case, finished)
    return [] if lr is None else [Job(case, lr, SEEDS[0], length) for length in LENGTHS]


def report(finished: Finished) -> str:
    """Format held-out losses of all cases found so far, as Markdown."""
    rows = []
    base, alone = (_of_seeds(case, finished) for case in CASES[:2])
    for case in CASES:
        losses = _of_seeds(case, finished)
        if not losses:
            continue
        apart = [loss - base[seed] for seed, loss in losses.items() if seed in base]
        listed = ", ".join(f"{loss:.4f}" for loss in losses.values())
        gap = f"{mean(apart):+.4f}" if apart else ""
        ways = [
            (alone[seed] - loss) / (alone[seed] - base[seed])
            for seed, loss in losses.items()
            if seed in base and seed in alone
        ]
        way = f"{mean(ways):.0%}" if ways else ""
        rows.append((case.name, f"{best_rate(case, finished):g}", listed, gap, way))
    heads = (
        "training | learning rate | held-out loss by seed | less synchronous, mean | "
        "of the way from alone to synchronous"
    )
    sweeps = {case.name: sweep(case.name, finished) for case in CASES if not case.rates_of}
    tried = [lr for lr in RATES if any(lr in losses for losses in sweeps.values())]
    swept = [
        (name, *(f"{losses[lr]:.4f}" if lr in losses else "" for lr in tried))
        for name, losses in sweeps.items()
    ]
    rates = " | ".join(["swept", *(f"{lr:g}" for lr in tried)])
    lengths = " | ".join(["steps", *(f"{length:g} times" for length in LENGTHS)])
    longer = [
        (case.name, *(_last(job, finished) for job in lengths_of(case, finished)))
        for case in of_all_lengths(finished)
        if lengths_of(case, finished)
    ]
    parts = (markdown_table(heads, rows), markdown_table(rates, swept))
    return "\n".join([*parts[0], "", *parts[1], "", *markdown_table(lengths, longer)]) + "\n"


def _last(job: Job, finished: Finished) -> str:
    return f"{finished[job.name].last:.4f}" if job.name in finished else ""


def _of_seeds(case: Case, finished: Finished) -> dict[int, float]:
    lr = best_rate(case, finished)
    names = {seed: Job(case, lr, seed).name for seed in SEEDS} if lr is not None else {}
    return {seed: finished[name].last for seed, name in names.items() if name in finished}


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="study_outer.py", description=DESCRIPTION)
    add = parser.add_argument
    add("--folder", type=Path, required=True, metavar="DIR", help="of trainings and results")
    add("--train-iters", type=int, default=800, help="of a training, of 4,096 tokens; default 800")
    add("--eval-interval", type=int, default=100, help="default 100")
    add("--data", type=Path, default=QUICKSTART, metavar="DIR", help="quickstart's")
    cores = len(os.sched_getaffinity(0))
    add("--at-once", type=int, default=cores, metavar="N", help="trainings side by side")
    args = parser.parse_args(argv)
    check_least(
        1,
        train_iters=args.train_iters,
        eval_interval=args.eval_interval,
        at_once=args.at_once,
    )
    data = data_flags(args.data)

    def flags_for(finished: Finished) -> dict[str, list[str]]:
        flags = {}
        for job in jobs_for(finished):
            steps = max(1, round(args.train_iters * job.length))
            words = job.case.words(job.lr, job.seed, steps, args.eval_interval)
            flags[job.name] = [*words, *data]
        return flags

    text = report(run_all(flags_for, args.folder, at_once=args.at_once))
    write_text(args.folder / "report.md", text)
    print_line(text)


if __name__ == "__main__":
    run_script("study_outer.py", main)
