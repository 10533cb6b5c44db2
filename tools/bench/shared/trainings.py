"""Trainings of a study: each is a process, and its losses are kept, so that it runs once."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path

from paro.errors import RunError, UserError
from paro.files.schema import read_json
from paro.report.log import print_line
from tools.bench.shared.turns import ROOT, start_training
from tools.run_report.runs import read_runs
from tools.shared.output import write_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Losses of a training: pairs of iteration and loss."""

    loss: list[tuple[int, float]]  # in training
    held_out: list[tuple[int, float]]  # of the last iteration twice, if an evaluation was due then
    seconds: float  # by the clock
    flags: str = ""  # with which it was started

    @property
    def last(self) -> float:
        """The loss on held-out text after training."""
        return self.held_out[-1][1]


@dataclass(frozen=True, slots=True)
class Variant:
    """A training's differences: flags, its part of the iterations, or the script."""

    name: str
    flags: str = ""
    part: float = 1.0
    script: str = "pretrain_llama.py"


Finished = dict[str, Losses]  # by the name of the training
QUICKSTART = ROOT / "runs/quickstart"
ABLATED = "tools/bench/ablated.py"


def data_flags(folder: Path) -> list[str]:
    """Return flags for the quickstart's text and tokenizer; `UserError` without them."""
    corpus, tokenizer = folder.absolute() / "corpus_text_document", folder / "tokenizer.model"
    if not corpus.with_suffix(".bin").is_file():
        raise UserError(f"--data {folder} holds no corpus: run make quickstart first")
    return ["--data-path", str(corpus), "--tokenizer-model", str(tokenizer.absolute())]


def read_finished(file: Path) -> Finished:
    """Return the trainings that a file of `run_missing` holds; none if it does not exist."""
    finished: Finished = read_json(file, dict[str, Losses]) if file.exists() else {}
    return finished


def run_all(
    flags_for: Callable[[Finished], Mapping[str, Sequence[str]]],
    folder: Path,
    *,
    file: Path | None = None,
    launch: Sequence[str] = (sys.executable,),
    at_once: int = 1,
) -> Finished:
    """Run the trainings of a study that `file` lacks, `at_once` at a time, and add each to it.

    `launch` with the flags of a training starts it. `flags_for` returns these by name, the next
    training first; it is called after each training, and may return more if they depend on results.
    `file` is runs.json in `folder` by default. `UserError` if it holds a training of the same name
    with other flags.
    """
    file = file or folder / "runs.json"
    finished = read_finished(file)
    under_way: dict[Future[Losses], tuple[str, int]] = {}  # with the number of its folder
    failure: Exception | None = None
    with ThreadPoolExecutor(at_once) as pool:
        while True:
            flags = flags_for(finished)
            for name, words in flags.items():
                if name in finished and finished[name].flags not in ("", shlex.join(words)):
                    text = f"{file} holds {name} with other flags: give another file or folder"
                    raise UserError(text)
            busy = dict(under_way.values())
            missing = [name for name in flags if name not in finished and name not in busy]
            free = (slot for slot in range(at_once) if slot not in busy.values())
            for name, slot in zip(missing, free, strict=False) if failure is None else ():
                job = pool.submit(train, name, launch, flags[name], folder / str(slot))
                under_way[job] = name, slot
            if not under_way:
                break
            for job in wait(under_way, return_when=FIRST_COMPLETED).done:
                name, _ = under_way.pop(job)
                try:
                    finished[name] = job.result()
                except Exception as error:  # trainings that are under way are kept
                    failure = error
                    continue
                kept = {each: asdict(losses) for each, losses in finished.items()}
                write_json(file, kept, is_update=True)
                losses, to_follow = finished[name], len(flags.keys() - finished.keys())
                print_line(
                    f"{len(finished)} done, {to_follow} known to follow: {name}: "
                    f"{losses.last:.4f} on held-out text, {losses.seconds:.0f} s"
                )
    if failure is not None:
        raise failure
    return finished


def train(name: str, launch: Sequence[str], flags: Sequence[str], folder: Path) -> Losses:
    """Train once, in a folder that is emptied, with a thread a rank; `RunError` if it fails."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    metrics, log = folder / "metrics.jsonl", folder / "log"
    begin = time.monotonic()
    command = [*launch, *flags, "--metrics-file", str(metrics.absolute())]
    if start_training(command, log).wait() != 0:
        last = (log.read_text(errors="replace").splitlines() or ["no output"])[-1]
        raise RunError(f"{name} failed, {log} says why: {last}")
    (run,) = read_runs([metrics], [name])
    iterations, losses = run.series("lm_loss")
    return Losses(
        loss=list(zip(map(int, iterations), losses, strict=True)),
        held_out=[(at["iteration"], at["lm_loss"]) for at in run.evaluations],
        seconds=time.monotonic() - begin,
        flags=shlex.join(flags),
    )
