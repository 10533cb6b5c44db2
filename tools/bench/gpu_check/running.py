"""Commands of a part: their time limit, log and end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tools.bench.shared.turns import ROOT, torchrun

PART_SECONDS = 8 * 60.0

GRACE_SECONDS = 4.0  # between asking a command to stop and killing it
_GRACE_OF_TORCHRUN = 40.0  # it asks its ranks, and kills them itself after 30 s
_ENVIRONMENT = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}  # as in the launch scripts
_TRACEBACK = re.compile(r"^\S*(?:Error|Exception|Interrupt)\b.*", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a part: whether it passed, figures for the JSON file, lines for the page."""

    passed: bool
    lines: tuple[str, ...]
    figures: Mapping[str, Any] = field(default_factory=dict)
    pictures: tuple[str, ...] = ()  # file names in the folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A command that has ended, or was stopped at its limit."""

    status: int
    output: str
    seconds: float
    timed_out: bool = False
    figures: Any = None  # what it wrote, where `Runner.measured` ran it

    @property
    def failure(self) -> str | None:
        """The line that tells most about a failure; None after a success."""
        if self.timed_out:
            return f"stopped after {self.seconds:.0f} s: the part's time was over"
        if self.status == 0:
            return None
        lines = self.output.strip().splitlines() or [""]
        errors = [line for line in lines if ": error: " in line] or _TRACEBACK.findall(self.output)
        return f"status {self.status}: {errors[-1] if errors else lines[-1]}".strip()

    @property
    def problem(self) -> str | None:
        """The reason why figures are missing or not to be trusted; None if all is well."""
        return self.failure or ("no figures" if self.figures is None else None)

    def outcome(self, key: str) -> Outcome:
        """Run a part that is one command: its lines, and its figures under a key."""
        if self.problem is not None:
            return Outcome(passed=False, lines=(self.problem,))
        lines = tuple(filter(None, self.output.splitlines()))
        return Outcome(passed=True, lines=lines, figures={key: self.figures})


@dataclass(slots=True, kw_only=True)
class Runner:
    """Runner of a part's commands one after the other, within the time that it has left."""

    folder: Path
    rehearse: bool
    num_gpus: int
    device_bytes: int = 0  # of one GPU
    has_fp8: bool = True
    seconds: float = PART_SECONDS  # of all commands
    begin: float = field(default_factory=time.monotonic)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.begin + self.seconds - time.monotonic())

    @property
    def grace(self) -> float:
        return GRACE_SECONDS if self.num_gpus == 1 else _GRACE_OF_TORCHRUN

    def stop(self) -> None:
        """End the command that runs, from another thread; no other begins."""
        self.seconds = 0.0
        if self._process is not None:
            _end(self._process, self.grace)

    def run(
        self,
        name: str,
        words: Sequence[object],
        *,
        alone: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> Ended:
        """Run this Python with the words, from the repository's root; the log is NAME.log.

        Where there are several GPUs it is under torchrun, unless `alone`. When the part's time is
        over it is not begun.
        """
        if not self.seconds_left:
            return Ended(status=-1, output="", seconds=0.0, timed_out=True)
        if self.num_gpus > 1 and not alone:
            words = [*torchrun(self.num_gpus), *words]
        log = self.folder / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, *map(str, words)]
        begin = time.monotonic()
        with log.open("w+", encoding="utf-8", errors="replace") as stream:
            process = self._process = subprocess.Popen(
                argv,
                cwd=ROOT,
                env={**_ENVIRONMENT, **os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status, timed_out = process.wait(timeout=self.seconds_left), False
            except subprocess.TimeoutExpired:
                status, timed_out = -1, True
            finally:
                _end(process, self.grace)
            output = log.read_text(encoding="utf-8", errors="replace")
        seconds = time.monotonic() - begin
        return Ended(status=status, output=output, seconds=seconds, timed_out=timed_out)

    def measured(self, name: str, words: Sequence[object], **options: Any) -> Ended:
        """Run it as `run` does with these options; the figures of --json are in NAME.json."""
        path = self.folder / f"{name}.json"
        path.unlink(missing_ok=True)
        ended = self.run(name, [*words, "--json", path], **options)
        return replace(ended, figures=json.loads(path.read_bytes()) if path.exists() else None)

    @property
    def backend(self) -> str:
        return "gloo" if self.rehearse else "nccl"


def _end(process: subprocess.Popen[bytes], grace: float) -> None:
    """Interrupt the processes of a command, which lets pytest report, and then kill them."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(timeout=grace)
