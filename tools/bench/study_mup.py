"""Sweeps the learning rate of models of several widths with muP and without it, and compares."""

# One process a training, in fp32. Models differ in width alone: as many heads and blocks, so that
# heads grow too. All held-out samples are read by every evaluation.

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paro.distributed.user_errors import run_script
from paro.errors import check_least
from paro.report.log import print_line
from tools.bench.shared.trainings import QUICKSTART, Finished, data_flags, run_all
from tools.bench.study_optimizers import FIRST, FLAGS, LEAST_RATE, RATES
from tools.shared.command_line import Parser
from tools.shared.output import markdown_table, write_text

DESCRIPTION = """\
Sweeps the learning rate of models of several widths with muP and without it: with muP the best
rate of the narrowest should be that of all. The text is the quickstart's (make quickstart).
--folder gets runs.json, to which every training is added, so that a study can be stopped and
continued, and report.md.

  python tools/bench/study_mup.py --folder runs/mup
  python tools/bench/study_mup.py --folder runs/mup-small --widths 32 64 --train-iters 20
"""
NARROW = 128  # the width whose flags study_optimizers.py has, with 4 heads


@dataclass(frozen=True, slots=True)
class Sweep:
    """Trainings of one width, with muP of a base width or without it (None)."""

    width: int
    base: int | None

    @property
    def name(self) -> str:
        return f"{'without muP' if self.base is None else 'muP'}, width {self.width}"

    def job(self, lr: float) -> str:
        """Return the name of the training with a learning rate."""
        return f"{self.name}, learning rate {lr:g}"

    def words(self, lr: float, iterations: int) -> list[str]:
        """Return the script of a training, and its flags."""
        own = FLAGS.replace(f"--hidden-size {NARROW}", f"--hidden-size {self.width}")
        own += f" --lr {lr:g} --min-lr {LEAST_RATE * lr:g} --train-iters {iterations}"
        if self.base is not None:
            own += f" --use-mup --mup-base-hidden-size {self.base}"
            own += f" --mup-base-head-dim {self.base // 4}"
        return f"pretrain_llama.py {own} --eval-interval {iterations}".split()

    def losses(self, finished: Finished) -> dict[float, float]:
        """Return the held-out losses by learning rate, as far as they are finished."""
        return {lr: finished[self.job(lr)].last for lr in RATES if self.job(lr) in finished}

    def best(self, finished: Finished) -> float | None:
        losses = self.losses(finished)
        return min(losses, key=losses.__getitem__, default=None)

    def rates(self, finished: Finished) -> list[float]:
        """Return the rates to try so far: the first ones, then both neighbours of the best."""
        tried, best = {*FIRST, *self.losses(finished)}, self.best(finished)
        if best is not None and tried == self.losses(finished).keys():
            at = RATES.index(best)
            tried |= {*RATES[max(0, at - 1) : at + 2]}
        return sorted(tried)


def sweeps_of(widths: Sequence[int]) -> list[Sweep]:
    return [Sweep(width, base) for base in (min(widths), None) for width in widths]


def report(sweeps: Sequence[Sweep], finished: Finished) -> str:
    """Format held-out losses by learning rate, the least of each sweep bold, as Markdown."""
    rows = []
    for lr in RATES:
        losses = [sweep.losses(finished).get(lr) for sweep in sweeps]
        if any(loss is not None for loss in losses):
            cells = [f"{lr:g}"]
            for sweep, loss in zip(sweeps, losses, strict=True):
                text = "" if loss is None else f"{loss:.4f}"
                cells.append(f"**{text}**" if sweep.best(finished) == lr else text)
            rows.append(cells)
    heads = " | ".join(("learning rate", *(sweep.name for sweep in sweeps)))
    return "\n".join(markdown_table(heads, rows)) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="study_mup.py", description=DESCRIPTION)
    add = parser.add_argument
    add("--folder", type=Path, required=True, metavar="DIR", help="of trainings and results")
    add("--widths", type=int, nargs="+", default=[128, 256, 512], metavar="N", help="hidden sizes")
    add("--train-iters", type=int, default=400, help="of a training, of 2,048 tokens; default 400")
    cores = len(os.sched_getaffinity(0))
    add("--at-once", type=int, default=cores, metavar="N", help="trainings side by side")
    add("--data", type=Path, default=QUICKSTART, metavar="DIR", help="quickstart's")
    args = parser.parse_args(argv)
    check_least(1, train_iters=args.train_iters, at_once=args.at_once)
    data, sweeps = data_flags(args.data), sweeps_of(args.widths)

    def flags_for(finished: Finished) -> dict[str, list[str]]:
        return {
            sweep.job(lr): [*sweep.words(lr, args.train_iters), *data]
            for sweep in sweeps
            for lr in sweep.rates(finished)
        }

    text = report(sweeps, run_all(flags_for, args.folder, at_once=args.at_once))
    write_text(args.folder / "report.md", text)
    print_line(text)


if __name__ == "__main__":
    run_script("study_mup.py", main)
