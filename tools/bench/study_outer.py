"""Trains a small model synchronously and with outer steps, and compares held-out losses."""

# A training is a process for each group, of one rank, in fp32; groups share the batch, and all
# trainings but `alone` see the same tokens. Learning rates are swept, of synchronous training and
# of outer steps each, since these bear other rates; then one setting of outer steps is changed at a
# time. All held-out samples are read by every evaluation.

from __future__ import annotations

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
setting at a time, the most important ones with three seeds. --folder gets runs.json, to which every
training is added, so that a study can be stopped and continued, and report.md.

  python tools/bench/study_outer.py --folder runs/outer
"""
BATCH = 16  # samples a step, of all groups together
RATES = (1e-3, 2e-3, 4e-3)


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
        rates_of="" if name == FIRST else f"synchronous{muon}" if flags else FIRST,
        seeds=seeds,
    )


FIRST = "2 groups, H 16"
CASES = (
    Case(name="synchronous", seeds=3),
    Case(name="one group alone, half the batch", part=0.5, rates_of="synchronous", seeds=3),
    outer_case(FIRST, seeds=3),
    outer_case("2 groups, without warm-up", warmup=0),
    outer_case("4 groups, H 16", 4, seeds=3),
    outer_case("2 groups, 4 bits", bits=4, seeds=3),
    outer_case("2 groups, delay 2", delay=2),
    outer_case("2 groups, H 8", steps=8),
    outer_case("2 groups, H 32", steps=32),
    *(
        outer_case(f"2 groups, outer rate {lr:g}, momentum {momentum:g}", lr=lr, momentum=momentum)
        for lr in (0.6, 0.8, 1.0)
        for momentum in (0.0, 0.5, 0.9)
        if (lr, momentum) != (0.8, 0.9)
    ),
    Case(name="synchronous Muon", flags=MUON.flags),
    outer_case("2 groups, Muon", flags=MUON.flags),
)


@dataclass(frozen=True, slots=True)
class Job:
    """A training: a case with its learning rate and seed."""

    case: Case
    lr: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.case.name}, learning rate {self.lr:g}, seed {self.seed}"


def sweep(name: str, finished: Finished) -> dict[float, float]:
    """Return the held-out losses of a case with the first seed, by learning rate."""
    (case,) = (each for each in CASES if each.name == name)
    names = {lr: Job(case, lr, SEEDS[0]).name for lr in RATES}
    return {lr: finished[job].last for lr, job in names.items() if job in finished}


def best_rate(case: Case, finished: Finished) -> float | None:
    """Return the learning rate of a case; None until its sweep is complete."""
    losses = sweep(case.rates_of or case.name, finished)
    return min(losses, key=losses.__getitem__) if len(losses) == len(RATES) else None


def jobs_for(finished: Finished) -> list[Job]:
    """Return the jobs in order, of the first seed first, up to one that waits for a sweep."""
    jobs: list[Job] = []
    for number, seed in enumerate(SEEDS):
        for case in CASES:
            if number == 0 and not case.rates_of:
                jobs += [Job(case, lr, seed) for lr in RATES]
            lr = best_rate(case, finished)
            if lr is None:
                return jobs
            if number < case.seeds:
                jobs.append(Job(case, lr, seed))
    return list(dict.fromkeys(jobs))


def report(finished: Finished) -> str:
    """Format held-out losses of all cases found so far, as Markdown."""
    rows = []
    base = _of_seeds(CASES[0], finished)
    for case in CASES:
        losses = _of_seeds(case, finished)
        if not losses:
            continue
        apart = [loss - base[seed] for seed, loss in losses.items() if seed in base]
        listed = ", ".join(f"{loss:.4f}" for loss in losses.values())
        gap = f"{mean(apart):+.4f}" if apart else ""
        rows.append((case.name, f"{best_rate(case, finished):g}", listed, gap))
    heads = "training | learning rate | held-out loss by seed | less synchronous, mean"
    swept = [
        (name, *(f"{sweep(name, finished).get(lr, float('nan')):.4f}" for lr in RATES))
        for name in (case.name for case in CASES if not case.rates_of)
    ]
    rates = " | ".join(["swept", *(f"{lr:g}" for lr in RATES)])
    return "\n".join([*markdown_table(heads, rows), "", *markdown_table(rates, swept)]) + "\n"


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
    length = args.train_iters, args.eval_interval

    def flags_for(finished: Finished) -> dict[str, list[str]]:
        jobs = jobs_for(finished)
        return {job.name: [*job.case.words(job.lr, job.seed, *length), *data] for job in jobs}

    text = report(run_all(flags_for, args.folder, at_once=args.at_once))
    write_text(args.folder / "report.md", text)
    print_line(text)


if __name__ == "__main__":
    run_script("study_outer.py", main)
