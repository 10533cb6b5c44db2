"""Trains a small model with AdamW and Muon, learning rates swept, and compares held-out losses."""

# One process a training, in fp32: what differs are the optimizer, its learning rate and the seed,
# which decides initial values and the order of samples. All held-out samples are read by every
# evaluation, so losses of one iteration differ by training alone.

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paro.distributed.user_errors import run_script
from paro.errors import check_least
from paro.report.log import print_line
from tools.bench.shared.trainings import (
    ABLATED,
    QUICKSTART,
    Finished,
    Losses,
    Variant,
    data_flags,
    run_all,
)
from tools.shared.command_line import Parser
from tools.shared.output import markdown_table, write_text
from tools.shared.picture import check_can_draw, drawing, log_scale

DESCRIPTION = """\
Sweeps the learning rate of AdamW and of Muon, trains three seeds with the best one of each, Muon
also on a schedule of three quarters of the iterations and with parts of matrices in most steps, and
AdamW with moments in bf16. The text is the quickstart's (make quickstart). --folder gets runs.json,
to which every training is added, so that a study can be stopped and continued, report.md and
curves.png.

  python tools/bench/study_optimizers.py --folder runs/optimizers
"""
FLAGS = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 256 "
    "--untie-embeddings-and-output-weights --micro-batch-size 8 --global-batch-size 8 "
    "--lr-decay-style cosine --lr-warmup-fraction 0.1 --weight-decay 0.1 --adam-beta2 0.95 "
    "--split 98,2,0 --full-validation --num-workers 0 --log-interval 10 --peak-tflops 1 "
    "--distributed-backend gloo --tokenizer-type SentencePieceTokenizer"
)
RATES = tuple(5e-4 * 2**step for step in range(-2, 7))
FIRST = RATES[2:-2]  # to sweep; where the best one is at an edge, its neighbour is tried too
LEAST_RATE = 0.1  # of the schedule, relative to its highest
SEEDS = (1, 2, 3)

ADAMW = Variant("AdamW")
MUON = Variant("Muon", "--optimizer muon --muon-extra-scale-factor 0.2")
SHORTER = Variant("Muon, 3/4 of the iterations", MUON.flags, 0.75)
IN_PARTS = Variant("Muon, parts in most steps", MUON.flags, script=f"{ABLATED} whole-matrices")
ROUNDED = Variant("AdamW, moments in bf16", "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16")
SWEPT = (ADAMW, MUON)
# Whose learning rate they take.
LIKE = {ADAMW: ADAMW, MUON: MUON, SHORTER: MUON, IN_PARTS: MUON, ROUNDED: ADAMW}


@dataclass(frozen=True, slots=True)
class Job:
    """A training."""

    variant: Variant
    lr: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.variant.name}, learning rate {self.lr:g}, seed {self.seed}"

    def flags(self, iterations: int, interval: int) -> list[str]:
        """Return the script of the training, and its flags."""
        own = f"--lr {self.lr:g} --min-lr {LEAST_RATE * self.lr:g} --seed {self.seed}"
        own += f" --train-iters {round(self.variant.part * iterations)} --eval-interval {interval}"
        return f"{self.variant.script} {FLAGS} {self.variant.flags} {own}".split()


def sweep(variant: Variant, finished: Finished) -> dict[float, float]:
    """Return the held-out losses of the first seed, by learning rate."""
    names = {rate: Job(variant, rate, SEEDS[0]).name for rate in RATES}
    return {rate: finished[name].last for rate, name in names.items() if name in finished}


def best_rate(variant: Variant, finished: Finished) -> float:
    losses = sweep(LIKE[variant], finished)
    return min(losses, key=losses.__getitem__)


def jobs_for(finished: Finished) -> list[Job]:
    """Return the jobs of the sweep so far: all that are done, and those to do next."""
    jobs = [Job(variant, rate, SEEDS[0]) for rate in FIRST for variant in SWEPT]
    if any(job.name not in finished for job in jobs):
        return jobs
    for variant in SWEPT:
        tried = sweep(variant, finished)
        at = RATES.index(best_rate(variant, finished))
        neighbours = {*tried, *RATES[max(0, at - 1) : at + 2]}
        jobs += [Job(variant, rate, SEEDS[0]) for rate in RATES if rate in neighbours]
    if any(job.name not in finished for job in jobs):
        return jobs
    jobs += [Job(variant, best_rate(variant, finished), seed) for variant in LIKE for seed in SEEDS]
    return list(dict.fromkeys(jobs))


def steps_to(loss: float, held_out: Sequence[tuple[int, float]]) -> float | None:
    """Interpolate the iteration at which a held-out loss is reached."""
    before: tuple[int, float] | None = None
    for at, value in held_out:
        if value <= loss:
            if before is None:
                return at
            began, above = before
            return began + (at - began) * (above - loss) / (above - value)
        before = at, value
    return None


def of_seeds(variant: Variant, finished: Finished) -> dict[int, Losses]:
    """Return the trainings with the best learning rate, by seed, as far as they are done."""
    rate = best_rate(variant, finished)
    names = {seed: Job(variant, rate, seed).name for seed in SEEDS}
    return {seed: finished[name] for seed, name in names.items() if name in finished}


# Text #


def report(finished: Finished) -> str:
    """Format the sweep and the losses of all seeds found so far, as Markdown."""
    return (
        "\n".join([*_sweep_lines(finished), "", *_seed_lines(finished), "", *_findings(finished)])
        + "\n"
    )


def _sweep_lines(finished: Finished) -> list[str]:
    """Return held-out losses of the first seed; the best ones are bold."""
    swept = [sweep(variant, finished) for variant in SWEPT]
    best = [min(losses.values(), default=None) for losses in swept]
    rows = []
    for rate in RATES:
        losses = [tried.get(rate) for tried in swept]
        if losses != [None, None]:
            rows.append((f"{rate:g}", *map(_bold, losses, best)))
    return markdown_table(" | ".join(("learning rate", *(each.name for each in SWEPT))), rows)


def _bold(loss: float | None, least: float | None) -> str:
    text = "" if loss is None else f"{loss:.4f}"
    return f"**{text}**" if text and loss == least else text


def _seed_lines(finished: Finished) -> list[str]:
    heads = "trained with | learning rate | held-out loss by seed | mean | most - least"
    rows = []
    for variant, like in LIKE.items():
        if not sweep(like, finished) or not (runs := of_seeds(variant, finished)):
            continue
        losses = [run.last for run in runs.values()]
        apart = _beside_adamw(runs, finished)
        cells = [
            *(variant.name, f"{best_rate(variant, finished):g}", _listed(losses, ".4f")),
            *(f"{mean(losses):.4f}", f"{max(losses) - min(losses):.4f}"),
            *(_listed(apart, "+.4f"), f"{mean(apart):+.4f}" if apart else ""),
        ]
        rows.append(cells)
    return markdown_table(f"{heads} | beside AdamW, by seed | mean", rows)


def _beside_adamw(runs: Mapping[int, Losses], finished: Finished) -> list[float]:
    """Return held-out losses less AdamW's with the same seed."""
    base = of_seeds(ADAMW, finished)
    return [run.last - base[seed].last for seed, run in runs.items() if seed in base]


def _findings(finished: Finished) -> list[str]:
    """Say how many steps Muon needs to AdamW's loss."""
    if not all(sweep(variant, finished) for variant in SWEPT):
        return []
    base, parts = of_seeds(ADAMW, finished), []
    for seed, run in of_seeds(MUON, finished).items():
        if seed in base:
            steps = steps_to(base[seed].last, run.held_out)
            parts.append(None if steps is None else steps / base[seed].held_out[-1][0])
    shown = ", ".join("never" if part is None else f"{part:.3f}" for part in parts)
    line = f"Muon comes to AdamW's last held-out loss after these parts of its steps: {shown}"
    reached = [part for part in parts if part is not None]
    if reached and len(reached) == len(parts):
        line += f"; mean {mean(reached):.3f}, most - least {max(reached) - min(reached):.3f}"
    return [line]


def _listed(values: Iterable[float], form: str) -> str:
    return ", ".join(f"{value:{form}}" for value in values)


def plot(finished: Finished, path: Path) -> None:
    """Draw the sweep, and held-out losses by iteration, every seed."""
    with drawing(path, 1, 2, size=(11, 4.5)) as (_, (swept, curves)):
        for color, (variant, like) in enumerate(LIKE.items()):
            style = {"color": f"C{color}", "marker": "."}
            if variant in SWEPT:
                losses = sweep(variant, finished)
                swept.plot(list(losses), list(losses.values()), label=variant.name, **style)
            runs = of_seeds(variant, finished) if sweep(like, finished) else {}
            for seed, run in runs.items():
                label = variant.name if seed == SEEDS[0] else None
                curves.plot(*zip(*run.held_out, strict=True), label=label, **style)
        log_scale(swept.xaxis)
        swept.set(xlabel="learning rate", ylabel="nat", title="after training")
        curves.set(xlabel="iteration", ylabel="nat", title="with the best rate, every seed")
        for panel in (swept, curves):
            panel.grid(alpha=0.3)
            panel.legend(fontsize="small")


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="study_optimizers.py", description=DESCRIPTION)
    add = parser.add_argument
    add("--folder", type=Path, required=True, metavar="DIR", help="of trainings and results")
    add("--train-iters", type=int, default=400, help="of a training, of 2,048 tokens; default 400")
    add("--eval-interval", type=int, default=20, help="default 20")
    add(
        "--at-once",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="trainings side by side, each with one thread; default: as many as cores",
    )
    add("--data", type=Path, default=QUICKSTART, metavar="DIR", help="quickstart's")
    args = parser.parse_args(argv)
    check_least(1, train_iters=args.train_iters, eval_interval=args.eval_interval)
    check_least(1, at_once=args.at_once)
    data = data_flags(args.data)
    picture = args.folder / "curves.png"
    check_can_draw(picture, "--folder")
    length = args.train_iters, args.eval_interval

    def flags_for(finished: Finished) -> dict[str, list[str]]:
        return {job.name: [*job.flags(*length), *data] for job in jobs_for(finished)}

    finished = run_all(flags_for, args.folder, at_once=args.at_once)
    text = report(finished)
    write_text(args.folder / "report.md", text)
    plot(finished, picture)
    print_line(text)


if __name__ == "__main__":
    run_script("study_optimizers.py", main)
