"""Measures the cost of dashboards and the terminal view per training step, beside a bare report."""

# The quickstart's model trains in one process, once, and its report alternates from step to step:
# none, all of it, all of it, none ... Each comparison is between neighbouring steps, with either
# kind first in turn, so the machine's drift cancels out.
# CPU time counts all threads of the process, including those that write to the dashboards. wandb's
# service is a separate process: it shows in the wall clock where cores are short.

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.console import Console

from paro.arguments.parser import parse_args
from paro.config.run import configure
from paro.distributed.control import Control
from paro.distributed.process_group import device_for
from paro.distributed.user_errors import run_script
from paro.distributed.world import World
from paro.errors import check_least
from paro.launch.placement import placement_lines
from paro.launch.prediction import bytes_by_part
from paro.planning.run_memory import RunMemory
from paro.report.dashboards import Dashboards, open_dashboards
from paro.report.live_view import LiveView
from paro.report.log import Log
from paro.report.memory import MemoryForecast
from paro.report.record import IterationRecord
from paro.report.report import Report
from paro.training.assembly import build_data, build_sources, build_training, run_facts
from paro.training.loop import Loop
from paro.training.step import TrainState
from tools.bench.shared.turns import median_ratio
from tools.shared.command_line import Parser
from tools.shared.output import write_json

MODEL = (
    "--distributed-backend gloo --mock-data --tokenizer-type NullTokenizer --vocab-size 4096 "
    "--num-layers 6 --hidden-size 256 --num-attention-heads 4 --seq-length 256 "
    "--micro-batch-size 4 --num-workers 0 --lr 1e-3 --eval-iters 0 --peak-tflops 1 "
    "--log-interval 1"
)


class Alternating(Report):
    """A bare report that passes every other iteration to a full one, and times both kinds."""

    full: Report

    def prepare(self, full: Report) -> None:
        self.full = full
        self.steps: list[dict[str, float]] = []
        self._begin = _now()

    def iteration(self, record: IterationRecord) -> None:
        before = _now()
        if is_reported(len(self.steps)):
            self.full.iteration(record)
        else:
            super().iteration(record)
        after = _now()
        step = {clock: after[clock] - self._begin[clock] for clock in after}
        inside = {f"{clock} in report": after[clock] - before[clock] for clock in after}
        self.steps.append(step | inside)
        self._begin = _now()


def _now() -> dict[str, float]:
    return {"wall": time.perf_counter(), "cpu": time.process_time()}


def is_reported(number: int) -> bool:
    """Return whether a step has the full report: of each two, the second and the first in turn."""
    return number % 4 in (1, 2)


def costs(steps: Sequence[dict[str, float]]) -> list[dict[str, Any]]:
    """Collect the seconds of steps with and without a report by each clock, and its cost.

    The first round does the set-up and does not count.
    """
    numbers = range(2, len(steps) // 2 * 2)
    rows: list[dict[str, Any]] = []
    for clock in ("wall", "cpu"):
        bare = [steps[number][clock] for number in numbers if not is_reported(number)]
        reported = [steps[number][clock] for number in numbers if is_reported(number)]
        inside = [steps[number][f"{clock} in report"] for number in numbers if is_reported(number)]
        row = {
            "clock": clock,
            "bare": bare,
            "reported": reported,
            "in_report": inside,  # spent by the training thread itself on reporting
            # By what fraction a reported step is longer: the median over pairs of neighbours.
            "part": median_ratio(reported, bare) - 1.0,
            "part_in_report": median(inside) / median(bare),
        }
        rows.append(row)
    return rows


def measure(rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Train two steps a round, one of them with full reporting."""
    flags = f"{MODEL} --global-batch-size 4 --train-iters {2 * rounds + 2}"
    boards = f"--tensorboard-dir {folder}/board --wandb-project bench --wandb-save-dir {folder}"
    config = configure(parse_args([*flags.split(), *boards.split()]), World())
    control = Control(World(), device_for(config.runtime, World()))
    training = build_training(config, control)
    predicted = bytes_by_part(RunMemory(None).of(config.spec))
    facts = replace(run_facts(config, training), predicted=predicted)
    state = TrainState.at_start(config.loss_scale)
    forecast = MemoryForecast(predicted_bytes=1, reserved_bytes=1, states_bytes=1, bytes_before=0)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        # Printing is part of the cost.
        log = Log(write=lambda message: print(message, file=nowhere, flush=True))
        given = (config.report, facts, log)
        more: dict[str, Any] = {"device": training.device}
        bare = Alternating(*given, **more, dashboards=Dashboards(log))
        full = Report(*given, **more, dashboards=open_dashboards(config.report, log, {}))
        full.view = LiveView(
            facts,
            title="bench",
            placement=placement_lines(config, training),
            console=Console(file=nowhere, force_terminal=True, width=120),
        )
        sources = build_sources(config, build_data(config), training, state)
        loop = Loop(training, state, sources, bare, saving=None)
        bare.forecast = full.forecast = forecast
        bare.prepare(full)
        loop.run()
        full.close()
    return costs(bare.steps)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="pairs of steps; default 20")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args(argv)
    check_least(1, rounds=options.rounds)
    os.environ.setdefault("WANDB_MODE", "offline")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.rounds, Path(folder))
    for row in found:
        print(
            f"{row['clock']}: a step takes {median(row['bare']) * 1000:.1f} ms, with TensorBoard, "
            f"W&B and the view {median(row['reported']) * 1000:.1f} ms: {100 * row['part']:+.2f}%; "
            f"spent in the report: {100 * row['part_in_report']:.2f}%"
        )
    write_json(options.json, found)


if __name__ == "__main__":
    run_script("bench_reporting.py", main)
