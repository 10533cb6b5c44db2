"""Kills ranks of a training inside saves and elsewhere, and checks that it recovers."""

# One training under torchrun --max-restarts: while it trains, a random rank is killed, torchrun
# restarts all ranks, and they resume by themselves. What must hold: every start continues from a
# complete checkpoint, every loss that is ever written is that of the same training undisturbed, the
# survivors exit soon, and at the end no process is left.

from __future__ import annotations

import argparse
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import psutil

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paro.checkpoint.directory import latest_iteration
from paro.checkpoint.manifest import read_manifest
from paro.distributed.user_errors import run_script
from paro.errors import check_least
from tools.bench.shared.turns import rows_in, start_training, torchrun
from tools.cluster.processes import children
from tools.shared.command_line import Parser
from tools.shared.output import print_json, write_json

SAVE_INTERVAL = 3
# About 15 MB of state: a save takes long enough to be interrupted.
MODEL = (
    "--distributed-backend gloo --mock-data --tokenizer-type NullTokenizer --vocab-size 4096 "
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 1 --lr 0.001 --log-interval 1 --num-workers 0 --eval-iters 0 "
    "--peak-tflops 1 --distributed-timeout-minutes 1"
)
# Saves take fractions of a second, so poll often.
_LOOK_SECONDS = 0.001
_SAVE_SECONDS = 0.1  # a kill comes up to so long after a save began
_PATIENCE_SECONDS = 180.0  # to train again; more is a hang


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """The result of one kill."""

    rank: int
    inside_save: bool
    asynchronous: bool
    survivors_gone_seconds: float
    trains_again_seconds: float | None = None  # None: the training did nothing after it


@dataclass(slots=True, kw_only=True)
class Study:
    """The results so far."""

    kills: list[Kill] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    num_starts: int = 0
    num_losses: int = 0
    num_passed_over: int = 0


class Launched:
    """A training under torchrun in its own folder, and its output."""

    def __init__(self, folder: Path, args: argparse.Namespace, *, asynchronous: bool) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.asynchronous = asynchronous
        self.checkpoints = folder / "ckpt"
        self.log = folder / "log"
        self.metrics = folder / "metrics.jsonl"
        flags = [*MODEL.split(), "--train-iters", str(args.train_iters)]
        flags += ["--global-batch-size", str(2 * args.ranks), "--paro-strategy", args.strategy]
        flags += ["--paro-group-size", str(args.group_size), "--metrics-file", str(self.metrics)]
        flags += ["--save", str(self.checkpoints), "--load", str(self.checkpoints)]
        flags += ["--save-interval", str(SAVE_INTERVAL)]
        flags += ["--async-save"] if asynchronous else []
        launcher = [*torchrun(args.ranks), "--max-restarts", "1000"]
        self.cut_short: set[tuple[str, int, int]] = set()
        self.process = start_training(
            [sys.executable, *launcher, "pretrain_llama.py", *flags], self.log
        )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def num_iterations(self) -> int:
        """Return the number of printed iterations, over all restarts."""
        return len(re.findall(r"\] iteration +\d+/", self.text()))

    def ranks(self) -> list[int]:
        """Return the rank processes since the last restart, by rank."""
        return children(self.process.pid)

    def unfinished(self) -> dict[tuple[str, int, int], int]:
        """Return iterations of the folders of unfinished saves; keys identify the folders."""
        iterations = {}
        for path in self.checkpoints.glob("iter_*.partial"):
            try:
                status = path.stat()
            except OSError:
                continue
            iterations[path.name, status.st_ino, status.st_ctime_ns] = int(path.name[5:12])
        return iterations

    def is_saving(self) -> int | None:
        """Return the iteration being written, or None; saves that kills cut do not count."""
        found = self.unfinished().items()
        return next((iteration for key, iteration in found if key not in self.cut_short), None)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()


def losses(path: Path) -> list[tuple[int, float]]:
    """Return (iteration, loss) for every loss written; lines that a kill cut are skipped."""
    return [(row["iteration"], row["lm_loss"]) for row in rows_in(path)]


def wait_for_training(training: Launched, iterations: int) -> bool:
    """Wait until more iterations were printed; False once the training has ended."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while training.num_iterations() <= iterations:
        if training.process.poll() is not None:
            return False
        if time.monotonic() > deadline:
            waited = f"no iteration within {_PATIENCE_SECONDS:.0f} s"
            raise TimeoutError(f"{waited}: {training.text()[-3000:]}")
        time.sleep(0.05)
    return True


def wait_for_the_moment(training: Launched, drawn: random.Random, *, inside: bool) -> int | None:
    """Wait for a random moment; for one inside a save, return the iteration being written."""
    if not inside:
        time.sleep(drawn.uniform(0.0, 1.5))
        return None
    while training.process.poll() is None:
        iteration = training.is_saving()
        if iteration is not None:
            time.sleep(drawn.uniform(0.0, _SAVE_SECONDS))
            return iteration
        time.sleep(_LOOK_SECONDS)
    return None


def kill_one(
    training: Launched, drawn: random.Random, args: argparse.Namespace, *, writing: int | None
) -> Kill | None:
    """Kill a random rank and wait until the others are gone."""
    ranks = training.ranks()
    if len(ranks) != args.ranks or training.process.poll() is not None:
        return None
    rank = drawn.randrange(len(ranks))
    processes = [psutil.Process(pid) for pid in ranks]
    begin = time.monotonic()
    saving = training.is_saving() if writing is None else writing
    processes[rank].kill()
    if psutil.wait_procs(processes, timeout=120.0)[1]:
        raise TimeoutError(f"ranks {ranks} stay after one was killed")
    gone = time.monotonic() - begin
    training.cut_short |= training.unfinished().keys()
    return Kill(
        rank=rank,
        inside_save=saving is not None and (latest_iteration(training.checkpoints) or 0) < saving,
        asynchronous=training.asynchronous,
        survivors_gone_seconds=gone,
    )


def disturb(
    training: Launched, study: Study, args: argparse.Namespace, drawn: random.Random
) -> None:
    """Kill until the training has ended or there were enough kills of both kinds."""
    if not wait_for_training(training, 0):
        return
    while wanted := wanted_kinds(study, args, asynchronous=training.asynchronous):
        inside = drawn.choice(wanted)
        iterations = training.num_iterations()
        writing = wait_for_the_moment(training, drawn, inside=inside)
        killed = kill_one(training, drawn, args, writing=writing)
        if killed is None:
            return
        begin = time.monotonic()
        iterations = max(iterations, training.num_iterations())
        again = wait_for_training(training, iterations)
        if again:
            seconds = killed.survivors_gone_seconds + time.monotonic() - begin
            killed = replace(killed, trains_again_seconds=seconds)
        study.kills.append(killed)
        print(f"kill {len(study.kills)}: {killed}", flush=True)
        if not again:
            return


def wanted_kinds(study: Study, args: argparse.Namespace, *, asynchronous: bool) -> list[bool]:
    """Return the kills that are missing: inside a save (True), or at any moment (False)."""

    def share(count: int) -> int:
        return count - count // 2 if asynchronous else count // 2

    kinds = Counter(kill.inside_save for kill in study.kills if kill.asynchronous == asynchronous)
    wanted = {True: share(args.inside), False: share(args.kills) - share(args.inside)}
    return [inside for inside, count in wanted.items() if kinds[inside] < count]


def judge(training: Launched, study: Study, undisturbed: dict[int, float]) -> None:
    """Check the losses, output and checkpoints of a disturbed training; add complaints."""
    complaints = study.complaints
    if training.process.wait(600) != 0:
        complaints.append(f"the training failed: {training.text()[-2000:]}")
    logged = losses(training.metrics)
    study.num_losses += len(logged)
    wrong = [(at, loss) for at, loss in logged if loss != undisturbed[at]]
    if wrong:
        complaints.append(f"losses differ from the undisturbed ones: {wrong[:5]}")
    if {at for at, _ in logged} != undisturbed.keys():
        complaints.append(f"iterations are missing: {sorted({at for at, _ in logged})}")
    text = training.text()
    study.num_starts += len(re.findall("holds no checkpoint|successfully loaded", text))
    study.num_passed_over += text.count("passing over iteration")
    for path in training.checkpoints.glob("iter_*"):
        if not path.suffix:
            read_manifest(path).verify()
    running = psutil.process_iter(["cmdline"])
    left = [one.pid for one in running if str(training.checkpoints) in (one.info["cmdline"] or ())]
    if left:
        complaints.append(f"processes are left: {left}")


def make_study(args: argparse.Namespace) -> Study:
    study, drawn = Study(), random.Random(args.seed)
    with closing(Launched(args.folder / "undisturbed", args, asynchronous=False)) as training:
        if training.process.wait(600) != 0:
            raise RuntimeError(training.text()[-3000:])
        undisturbed = dict(losses(training.metrics))
    for asynchronous in (False, True):
        while wanted_kinds(study, args, asynchronous=asynchronous):
            disturbed = Launched(args.folder / "disturbed", args, asynchronous=asynchronous)
            with closing(disturbed) as training:
                disturb(training, study, args, drawn)
                judge(training, study, undisturbed)
    return study


def describe(study: Study, args: argparse.Namespace) -> dict[str, object]:
    """Return the figures of a study, for a report."""
    again = [k.trains_again_seconds for k in study.kills if k.trains_again_seconds is not None]
    gone = [kill.survivors_gone_seconds for kill in study.kills]
    return {
        "kills": len(study.kills),
        "inside_saves": sum(kill.inside_save for kill in study.kills),
        "inside_asynchronous_saves": sum(k.inside_save and k.asynchronous for k in study.kills),
        "ranks": args.ranks,
        "strategy": args.strategy,
        "starts": study.num_starts,
        "losses_compared": study.num_losses,
        "checkpoints_passed_over": study.num_passed_over,
        "survivors_gone_seconds": _figures(gone),
        "trains_again_seconds": _figures(again),
        "complaints": study.complaints,
        "each": [asdict(kill) for kill in study.kills],
    }


def _figures(seconds: list[float]) -> dict[str, float] | None:
    """Return the median and the largest; None if nothing was measured."""
    return {"median": statistics.median(seconds), "most": max(seconds)} if seconds else None


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="folder of the trainings; is emptied")
    add("--kills", type=int, default=30, help="how many, half of them with --async-save")
    add("--inside", type=int, default=15, help="how many of them have to cut a save short")
    add("--ranks", type=int, default=4)
    add("--group-size", type=int, default=2)
    add("--strategy", default="IIG")
    add("--train-iters", type=int, default=36)
    add("--seed", type=int, default=1)
    add("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    check_least(1, kills=args.kills, ranks=args.ranks, train_iters=args.train_iters)
    study = make_study(args)
    figures = describe(study, args)
    write_json(args.json, figures)
    print_json({name: value for name, value in figures.items() if name != "each"}, indent=1)
    if study.complaints:
        raise SystemExit(1)


if __name__ == "__main__":
    run_script("study_crashes.py", main)
