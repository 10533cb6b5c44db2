"""Lets contenders of bench_model.py train in turns, or each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from threading import TIMEOUT_MAX, Timer

from paro.distributed.timers import time_of
from paro.report.log import print_line
from paro.report.memory import peak_memory_bytes
from tools.bench.model_speed.contenders import CONTENDERS, Step, Task
from tools.bench.shared.turns import ROOT, median_ratio, order_of_round

ROUND = "round "  # what the line of a round begins with
_SCRIPT = ROOT / "tools" / "bench" / "bench_model.py"


@dataclass(slots=True, kw_only=True)
class Result:
    """What was measured of each contender."""

    tokens_per_turn: int
    seconds: dict[str, list[float]] = field(default_factory=dict)  # of its turns, round by round
    first_losses: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)  # of the ones that ran alone
    failures: dict[str, str] = field(default_factory=dict)  # of the others: the last line

    def tokens_per_second(self, name: str) -> float:
        return self.tokens_per_turn / median(self.seconds[name])

    def ratio(self, name: str, other: str) -> float:
        """Speed relative to `other`: the median over rounds."""
        return median_ratio(self.seconds[other], self.seconds[name])


def race(
    task: Task,
    names: Sequence[str],
    *,
    rounds: int,
    steps: int,
    clock: str,
    go: Callable[[], str],
) -> Result:
    """Lets the contenders train in turns, in an order that rotates from round to round.

    `clock`: a field of `Took`. Calls `go` before each round, which may wait.
    """
    contenders = {name: CONTENDERS[name](task) for name in names}
    first_losses = {name: float(step()) for name, step in contenders.items()}
    for step in contenders.values():
        step()  # may allocate what stays allocated
    seconds: dict[str, list[float]] = {name: [] for name in names}

    def turn(step: Step) -> None:
        for _ in range(steps):
            step()

    for index in range(rounds):
        go()
        for name in order_of_round(names, index):
            took = time_of(partial(turn, contenders[name]), task.device)
            seconds[name].append(getattr(took, clock))
        last = ", ".join(f"{name} {turns[-1]:.3f}" for name, turns in seconds.items())
        print_line(f"{ROUND}{index + 1:3d}, seconds: {last}")
    alone = {names[0]: peak_memory_bytes(task.device)} if len(names) == 1 else {}
    return Result(
        tokens_per_turn=steps * task.num_tokens,
        seconds=seconds,
        first_losses=first_losses,
        peak_bytes=alone,
    )


class _OwnProcess:
    """A contender in a process of its own, with the same flags `argv`."""

    def __init__(
        self, name: str, argv: Sequence[str], folder: Path, most_seconds: float | None
    ) -> None:
        self.name, self._file, self._errors = name, folder / f"{name}.json", folder / f"{name}.err"
        own = [sys.executable, str(_SCRIPT), *argv]
        more = ["--no-own-process", "--paced", "--contenders", name, "--json", str(self._file)]
        with self._errors.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [*own, *more],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._limit = Timer(most_seconds or TIMEOUT_MAX, self._process.kill)
        self._limit.daemon = True
        self._limit.start()

    def run_round(self) -> None:
        """Returns after it, or when the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(ROUND):
                print_line(line.rstrip())
                return

    def end(self, result: Result) -> None:
        """Waits for the process and notes what it has measured, or why it failed."""
        self._process.communicate()
        if self._limit.finished.is_set():
            result.failures[self.name] = f"stopped after {self._limit.interval:g} s"
            return
        self._limit.cancel()
        if self._process.returncode != 0:
            lines = self._errors.read_text(encoding="utf-8").strip().splitlines()
            result.failures[self.name] = (lines or [f"status {self._process.returncode}"])[-1]
            return
        (row,) = json.loads(self._file.read_text(encoding="utf-8"))["rows"]
        result.seconds[self.name] = row["seconds"]
        result.first_losses[self.name] = row["first_loss"]
        result.peak_bytes[self.name] = row["peak_bytes"]

    def stop(self) -> None:
        """If it still runs."""
        self._limit.cancel()
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def race_in_own_processes(
    task: Task,
    names: Sequence[str],
    argv: Sequence[str],
    *,
    rounds: int,
    steps: int,
    ended: Callable[[Result], None],
    most_seconds: float | None = None,
) -> Result:
    """Lets each contender train in a process of its own: in turns on a CPU, one by one on a GPU.

    One that fails, for example for want of memory, or is stopped after `most_seconds`, does not end
    the others. After each `ended` gets the results so far: a race on a GPU that is stopped keeps
    them.
    """
    result = Result(tokens_per_turn=steps * task.num_tokens)
    groups = [names] if task.device.type == "cpu" else [(name,) for name in names]
    started: dict[str, _OwnProcess] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for group in groups:
                for index in range(rounds):
                    for name in order_of_round(group, index):
                        if name not in started:
                            started[name] = _OwnProcess(name, argv, Path(folder), most_seconds)
                        started[name].run_round()
                for name in group:
                    started[name].end(result)
                    ended(result)
        finally:
            for contender in started.values():
                contender.stop()
    return result
