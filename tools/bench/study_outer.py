"""Trains a small model synchronously and with outer steps, and compares held-out losses."""

# A training is a process for each group, of one rank, in fp32; groups share the batch, and all
# trainings but `ALONE` see the same tokens. Learning rates of synchronous training are swept; outer
# optimizers are tried at the best one, and the best of them with other learning rates, since outer
# steps bear other rates. From there one setting is changed at a time. Some are trained half and
# twice as long, too, as the gap depends on the length. All held-out samples are read by every
# evaluation.

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
(--paro-outer-steps), on the quickstart's text (make quickstart): learning rates and outer
optimizers, then one setting at a time, the most important ones with three seeds, and four with half
and twice as many steps. --folder gets runs.json, to which every training is added, so that a study
can be stopped and continued, and report.md.

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
    like: Case | None = None  # whose best rate is taken; None: rates are swept
    seeds: int = 1
    all_lengths: bool = False

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


SYNCHRONOUS = Case(name="synchronous", seeds=3, all_lengths=True)
ALONE = Case(
    name="one group alone, half the batch", part=0.5, like=SYNCHRONOUS, seeds=3, all_lengths=True
)
SYNCHRONOUS_MUON = Case(name="synchronous Muon", flags=MUON.flags)
# Outer optimizers, each tried at the best rate of synchronous training.
OPTIMIZERS = tuple(
    Case(
        name=f"2 groups, outer rate {lr:g}, momentum {momentum:g}",
        groups=2,
        outer={"steps": 16, "lr": lr, "momentum": momentum, "warmup": 100, "bits": 16, "delay": 0},
        like=SYNCHRONOUS,
    )
    for lr in (0.6, 0.8, 1.0)
    for momentum in (0.0, 0.5, 0.9)
)


def changed(best: Case) -> list[Case]:
    """Return the cases that differ from the best outer optimizer's in one setting."""

    def case(name: str, *, seeds: int = 1, flags: str = "", groups: int = 2, **outer: int) -> Case:
        like = SYNCHRONOUS_MUON if flags else best
        return replace(
            best,
            name=f"{groups} groups, {name}",
            groups=groups,
            outer=best.outer | outer,
            flags=flags,
            like=like,
            seeds=seeds,
            all_lengths=groups == 4,
        )

    return [
        case("H 16", groups=4, seeds=3),
        case("4 bits", bits=4, seeds=3),
        case("without warm-up", warmup=0),
        case("delay 2", delay=2),
        case("H 8", steps=8),
        case("H 32", steps=32),
        case("Muon", flags=MUON.flags),
    ]


def cases_for(finished: Finished) -> list[Case]:
    """Return the cases known so far: more once the best outer optimizer is known."""
    rate = best_rate(SYNCHRONOUS, finished)
    tried = [sweep(case, finished) for case in OPTIMIZERS]
    if any(rate not in losses for losses in tried):
        return [SYNCHRONOUS, ALONE, *OPTIMIZERS, SYNCHRONOUS_MUON]
    at = min(range(len(tried)), key=lambda index: min(tried[index].values()))
    best = replace(OPTIMIZERS[at], like=None, seeds=3, all_lengths=True)
    others = (case for case in OPTIMIZERS if case.name != best.name)
    return [SYNCHRONOUS, ALONE, best, *changed(best), *others, SYNCHRONOUS_MUON]


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


def sweep(case: Case, finished: Finished) -> dict[float, float]:
    """Return the held-out losses of a case with the first seed, by learning rate."""
    names = {lr: Job(case, lr, SEEDS[0]).name for lr in RATES}
    return {lr: finished[job].last for lr, job in names.items() if job in finished}


def rates_to_try(case: Case, finished: Finished) -> list[float]:
    """Return the learning rates of a case so far: of a sweep those around the best one."""
    losses = sweep(case, finished)
    if case.like is not None:
        rate = best_rate(case.like, finished)
        return [] if rate is None else [rate]
    if not losses or (not case.outer and not losses.keys() >= set(FIRST_RATES)):
        return [*FIRST_RATES]
    at = RATES.index(min(losses, key=losses.__getitem__))
    return sorted({*losses, *RATES[max(0, at - 1) : at + 2]})


def best_rate(case: Case, finished: Finished) -> float | None:
    """Return the learning rate of a case; None until its sweep is complete."""
    if case.like is not None:
        return best_rate(case.like, finished)
    losses = sweep(case, finished)
    is_complete = losses.keys() >= set(rates_to_try(case, finished))
    return min(losses, key=losses.__getitem__) if is_complete else None


def jobs_for(finished: Finished) -> list[Job]:
    """Return the jobs in order, of the first seed first, but for those that wait for a sweep."""
    cases = cases_for(finished)
    jobs = [Job(case, lr, SEEDS[0]) for case in cases for lr in rates_to_try(case, finished)]
    known = [(case, lr) for case in cases if (lr := best_rate(case, finished)) is not None]
    longer = [(case, lr) for case, lr in known if case.all_lengths]
    jobs += [Job(case, lr, SEEDS[0], length) for case, lr in longer for length in LENGTHS]
    jobs += [
        Job(case, lr, seed) for seed in SEEDS for case, lr in known if seed in SEEDS[: case.seeds]
    ]
    return list(dict.fromkeys(jobs))


def report(finished: Finished) -> str:
    """Format held-out losses of all cases found so far, as Markdown."""
    cases = [case for case in cases_for(finished) if _of_seeds(case, finished)]
    rows = []
    adamw, muon, alone = (_of_seeds(c, finished) for c in (SYNCHRONOUS, SYNCHRONOUS_MUON, ALONE))
    for case in cases:
        losses, base = _of_seeds(case, finished), muon if case.flags else adamw
        apart = [loss - base[seed] for seed, loss in losses.items() if seed in base]
        listed = ", ".join(f"{loss:.4f}" for loss in losses.values())
        gap = f"{mean(apart):+.4f}" if apart else ""
        ways = [
            (alone[seed] - loss) / (alone[seed] - base[seed])
            for seed, loss in losses.items()
            if seed in base and seed in alone and not case.flags  # no group alone has Muon
        ]
        way = f"{mean(ways):.0%}" if ways else ""
        rows.append((case.name, f"{best_rate(case, finished):g}", listed, gap, way))
    heads = (
        "training | learning rate | held-out loss by seed | less synchronous, mean | "
        "of the way from alone to synchronous"
    )
    sweeps = {case.name: sweep(case, finished) for case in cases_for(finished)}
    sweeps = {name: losses for name, losses in sweeps.items() if len(losses) > 1}
    tried = [lr for lr in RATES if any(lr in losses for losses in sweeps.values())]
    swept = [
        (name, *(f"{losses[lr]:.4f}" if lr in losses else "" for lr in tried))
        for name, losses in sweeps.items()
    ]
    rates = " | ".join(["learning rates", *(f"{lr:g}" for lr in tried)])
    lengths = " | ".join(["steps", *(f"{length:g} times" for length in LENGTHS)])
    longer = [
        (case.name, *(_last(Job(case, lr, SEEDS[0], each), finished) for each in LENGTHS))
        for case in cases
        if case.all_lengths and (lr := best_rate(case, finished)) is not None
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
