"""Compares the loss curves of runs, iteration by iteration."""

# Runs of the same model on the same samples differ by the order of their sums, and training
# amplifies such a difference. A second pair of runs with only that difference shows by how much.

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paro.distributed.user_errors import run_script
from paro.errors import UserError
from paro.report.log import print_line
from tools.run_report.runs import Run, read_runs
from tools.shared.command_line import Parser
from tools.shared.output import text_table, write_json
from tools.shared.picture import check_can_draw, drawing, label_of, log_scale

DESCRIPTION = """\
Compares the losses of runs with those of the first one: metrics files, written with
--log-interval 1. Prints relative differences, and can write and draw the curves.

  python tools/compare_curves.py gathered.jsonl rotated.jsonl --json curves.json --plot curves.png
"""


def losses_of(run: Run) -> dict[int, float]:
    """Return losses by iteration; for a repeated iteration the last one's."""
    iterations, losses = run.series("lm_loss")
    return {int(iteration): loss for iteration, loss in zip(iterations, losses, strict=True)}


def differences_from(run: Run, reference: Run) -> dict[int, float]:
    """Compute (loss - reference) / reference; `UserError` if no iteration is common."""
    mine, theirs = losses_of(run), losses_of(reference)
    shared = sorted(at for at in mine.keys() & theirs.keys() if theirs[at] != 0.0)
    if not shared:
        raise UserError(f"{run.name} and {reference.name} have logged no iteration in common")
    return {at: (mine[at] - theirs[at]) / theirs[at] for at in shared}


def distance_of(run: Run, reference: Run) -> dict[str, Any]:
    """Compare the losses of a run with the reference's: relative differences."""
    signed = list(differences_from(run, reference).values())
    sizes = [abs(value) for value in signed]
    return {
        "name": run.name,
        "first": sizes[0],  # at the first iteration that both have
        "early": max(sizes[: max(1, len(sizes) // 10)]),  # within the first tenth
        "largest": max(sizes),
        "mean": fmean(sizes),
        "mean_signed": fmean(signed),  # positive: losses are higher than the reference's
        "last_loss": list(losses_of(run).values())[-1],
    }


def table(distances: Sequence[dict[str, Any]], reference: Run) -> str:
    """Return the distances as a text table."""
    last = list(losses_of(reference).values())[-1]
    rows = (
        {
            "": row["name"],
            "first": f"{row['first']:.1e}",
            "first tenth": f"{row['early']:.1e}",
            "largest": f"{row['largest']:.1e}",
            "mean": f"{row['mean']:.1e}",
            "signed mean": f"{row['mean_signed']:+.1e}",
            "last loss": f"{row['last_loss']:.4f}",
        }
        for row in distances
    )
    title = f"losses next to those of {reference.name}, whose last is {last:.4f}, relative"
    return f"{title}\n{text_table(rows)}"


def draw(path: Path, runs: Sequence[Run]) -> None:
    """Draw the curves in one panel, and their differences below it."""
    with drawing(path, 2, 1, size=(8, 7), sharex=True) as (_, (losses, apart)):
        for number, run in enumerate(runs):
            curve = losses_of(run)
            style = {"linewidth": 2.5 - number, "linestyle": ("-", "--", ":")[min(number, 2)]}
            losses.plot(list(curve), list(curve.values()), label=label_of(run.name), **style)
            if number:
                gaps = differences_from(run, runs[0])
                sizes = [abs(gap) or None for gap in gaps.values()]
                label = f"{label_of(run.name)}, against {label_of(runs[0].name)}"
                apart.plot(list(gaps), sizes, label=label)
        losses.set_ylabel("loss")
        apart.set(xlabel="iteration", ylabel="relative difference of the loss")
        log_scale(apart.yaxis)
        for panel in (losses, apart):
            panel.grid(alpha=0.3)
            panel.legend()


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(description=DESCRIPTION)
    add = parser.add_argument
    add("metrics", nargs="+", type=Path, help="what --metrics-file wrote; the first is compared to")
    add("--names", nargs="+", default=(), help="of the runs; default: strategies")
    add("--json", type=Path, metavar="FILE", help="write curves and distances there")
    add("--plot", type=Path, metavar="FILE", help="draw them there (png, svg, pdf)")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    options = make_parser().parse_args(argv)
    if len(options.metrics) < 2:
        raise UserError("there is nothing to compare: give two metrics files or more")
    check_can_draw(options.plot)
    runs = read_runs(options.metrics, options.names)
    distances = [distance_of(run, runs[0]) for run in runs[1:]]
    figures = {
        "reference": runs[0].name,
        "distances": distances,
        "losses": {run.name: losses_of(run) for run in runs},
    }
    write_json(options.json, figures)
    if options.plot is not None:
        draw(options.plot, runs)
    print_line(table(distances, runs[0]))  # after what may still be refused


if __name__ == "__main__":
    run_script("compare_curves.py", main)
