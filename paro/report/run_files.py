"""The files of a run: metrics, a line for each logged iteration; its record; its progress."""

# A run that resumes from iteration k appends to the existing metrics file. Lines after k will be
# written again, so they are removed first, as is a last line that a crash cut short: no iteration
# appears twice. Lines after k are kept in FILE.earlier_N with a copy of the run's record, as are
# all lines of an earlier run where a fresh one begins (k = 0).
#
# The record FILE.run.json has arguments, environment and evaluations:
#
#     {"starts": [{"iteration", "time", "arguments", "facts", "environment", "measured"}, ...],
#      "validations": [{"iteration", "data_set", "lm_loss", "bits_per_byte", "ema_loss"}, ...]}
#
# A resumed run adds its start, and removes evaluations of iterations that it will run again.
#
# progress.txt has every start and save of a run. Its lines have Megatron-LM's fields, so that tools
# for its file can read this one: time, job, ranks, event; for a save also the iteration, the
# throughput of this job and that since the first job on as many ranks (including time between
# jobs), the FLOPs and the tokens so far.

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, cast

from paro.errors import UserError, about, describe, writing
from paro.files.atomic_file import replace_file
from paro.files.regular_file import read_bytes
from paro.files.schema import Count, Figure, Positive, parse_json, read_json
from paro.report.config import run_record_path
from paro.report.earlier import earlier_file
from paro.report.log import Log

if TYPE_CHECKING:  # importing these loads torch, which readers of the files do not need
    import torch

    from paro.report.record import Metrics, RunFacts, Validation

_BEGINNING = b'{"iteration": '
_MAX_BYTES = 2**32
PROGRESS_FILE = "progress.txt"
_TIME = "%Y-%m-%d %H:%M:%S"
_START = "Starting job"
_SAVES = ("Saved checkpoint", "Saving async checkpoint")
_FLOPS = "Floating-point operations: "


class _Line(TypedDict):
    iteration: float


class RunFile:
    """A file that one rank writes during a run, called `name`; it is left out after an I/O error.

    `is_ours` returns False once a successor has taken the file over; then nothing is written.
    """

    def __init__(self, name: str, log: Log, is_ours: Callable[[], bool] = lambda: True) -> None:
        self.name = name
        self.log = log
        self.is_ours = is_ours
        self.is_open = True

    def try_to(self, write: Callable[[], object]) -> None:
        """Write; print a line if that fails, as on a full disk."""
        if not (self.is_open and self.is_ours()):
            return
        try:
            write()
        except OSError as error:
            self.is_open = False
            self.log.log0(f"{self.name} is left out from here on: {describe(error)}")


class MetricsFile(RunFile):
    """JSON lines of metrics; NaN is written as null."""

    def __init__(
        self, path: str, log: Log, is_ours: Callable[[], bool], *, start_iteration: int
    ) -> None:
        super().__init__("--metrics-file", log, is_ours)
        file = Path(path)
        with writing(f"--metrics-file {path}"):
            file.parent.mkdir(parents=True, exist_ok=True)
            _keep_up_to(file, start_iteration, log.log0)
            self._stream = file.open("a", encoding="utf-8", buffering=1)  # writes whole lines

    def write(self, metrics: Metrics) -> None:
        """Append one line."""
        values = {
            name: [*map(_finite, value)] if isinstance(value, tuple) else _finite(value)
            for name, value in asdict(metrics).items()
        }
        self.try_to(lambda: self._stream.write(json.dumps(values, allow_nan=False) + "\n"))

    def close(self) -> None:
        if self.is_open:
            self._stream.close()


def read_lines(path: Path, what: str, say: Callable[[str], None]) -> list[bytes]:
    """Read the complete lines of a metrics file, unchecked; `say` gets a line about a partial line.

    The last line is partial if its run was killed, or is writing the line right now.
    """
    *lines, last = read_bytes(path, what, max_bytes=_MAX_BYTES).split(b"\n")
    if not last:
        return lines
    if lines or last.startswith(_BEGINNING[: len(last)]):  # otherwise not a metrics file
        try:
            parse_json(last, _Line, "")
        except UserError:
            say(f"{what}: the last line is cut short, as a killed run leaves it: it is left out")
            return lines
    return [*lines, last]


def _keep_up_to(path: Path, iteration: int, say: Callable[[str], None]) -> None:
    """Move the lines after `iteration`, with a copy of the record, into files of their own."""
    flag = f"--metrics-file {path}"
    lines = read_lines(path, flag, say) if path.exists() else []
    with about(suffix=": the file exists and is no metrics file; give another name"):
        iterations = [
            parse_json(line, _Line, f"{flag}, line {number}")["iteration"]
            for number, line in enumerate(lines, start=1)
        ]
    lines_before = [line for line, at in zip(lines, iterations, strict=True) if at <= iteration]
    removed = [line for line, at in zip(lines, iterations, strict=True) if at > iteration]
    record = run_record_path(path)
    if removed or (iteration == 0 and record.exists()):
        earlier = earlier_file(path)
        if record.exists():
            replace_file(run_record_path(earlier), read_bytes(record))
        if removed:
            replace_file(earlier, b"".join(line + b"\n" for line in removed))
        copy = earlier if removed else run_record_path(earlier)
        after = f" after iteration {iteration}" if iteration else ""
        say(f"{flag}: what an earlier start wrote{after} is in {copy} now")
    if lines and sum(len(line) + 1 for line in lines_before) != path.stat().st_size:
        replace_file(path, b"".join(line + b"\n" for line in lines_before))


class _Peak(TypedDict):
    source: str


class ReportedFacts(TypedDict):
    """Fields of a run's `RunFacts` that reports read."""

    world_size: NotRequired[Positive]
    peak: NotRequired[_Peak]
    predicted: NotRequired[dict[str, Figure]]


class _Start(TypedDict):
    iteration: Count
    time: NotRequired[str]
    arguments: NotRequired[dict[str, Any]]
    facts: NotRequired[ReportedFacts]
    environment: NotRequired[dict[str, str]]
    measured: NotRequired[dict[str, Any]]  # measured step; facts["planned"] has the predicted step


class _Validation(TypedDict):
    iteration: Count
    data_set: str
    lm_loss: Figure | None
    bits_per_byte: NotRequired[Figure | None]
    ema_loss: NotRequired[Figure | None]


class RecordFields(TypedDict):
    """The top-level fields of a run record file."""

    starts: NotRequired[list[_Start]]
    validations: NotRequired[list[_Validation]]


def read_record(path: Path) -> RecordFields:
    """Read a run's record; empty if there is no file."""
    if not path.exists():
        return {}
    with about(suffix="; remove it to go on without what it says"):
        return cast("RecordFields", read_json(path, RecordFields))


class RunRecord(RunFile):
    """The run record; every change rewrites the whole file."""

    def __init__(
        self, path: Path, log: Log, is_ours: Callable[[], bool], *, start_iteration: int
    ) -> None:
        super().__init__("the record of --metrics-file", log, is_ours)
        self._path = path
        record = read_record(path) if start_iteration > 0 else RecordFields()
        self._starts = [s for s in record.get("starts", []) if s["iteration"] < start_iteration]
        self._validations = [
            v for v in record.get("validations", []) if v["iteration"] <= start_iteration
        ]
        self._start_iteration = start_iteration

    def start(self, arguments: Mapping[str, object], facts: RunFacts, device: torch.device) -> None:
        """Add this start of the run."""
        self._starts.append(
            {
                "iteration": self._start_iteration,
                "time": datetime.now().astimezone().isoformat(timespec="seconds"),
                "arguments": dict(arguments),
                "facts": cast("ReportedFacts", asdict(facts)),
                "environment": environment(device),
            }
        )
        self._write()

    def measured(self, seconds: Mapping[str, float], peak_bytes: int) -> None:
        """Add peak memory and measured seconds, with the keys of `facts.planned`, to this start."""
        self._starts[-1]["measured"] = {"seconds": dict(seconds), "peak_bytes": peak_bytes}
        self.try_to(self._write)

    def validation(self, validation: Validation) -> None:
        """Add an evaluation."""
        self._validations.append(
            {
                "iteration": validation.iteration,
                "data_set": validation.name,
                "lm_loss": _finite(validation.lm_loss),
                "bits_per_byte": _finite(validation.bits_per_byte),
                "ema_loss": _finite(validation.ema_loss),
            }
        )
        self.try_to(self._write)

    def _write(self) -> None:
        record = {"starts": self._starts, "validations": self._validations}
        replace_file(self._path, json.dumps(record, indent=1, default=str) + "\n")


def _finite(value: float | None) -> float | None:
    """Return a number as JSON can have it: None where it is not finite."""
    return value if value is not None and math.isfinite(value) else None


def environment(device: torch.device) -> dict[str, str]:
    """Collect versions, hardware and settings that a run's measurements depend on besides flags."""
    import torch

    facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cores": str(os.cpu_count()),
        "threads of a rank": str(torch.get_num_threads()),
    }
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
        facts["CUDA"] = str(torch.version.cuda)
    else:
        facts["device"] = f"CPU, {_cpu_name()}"
    return facts


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


class ProgressFile(RunFile):
    """Megatron's progress.txt in the folder of --save, by the first rank."""

    def __init__(
        self, folder: str, facts: RunFacts, log: Log, *, start_samples: int, job_id: str
    ) -> None:
        super().__init__("--log-progress", log)
        self.is_open = log.rank == 0
        self._path = Path(folder) / PROGRESS_FILE
        self._facts = facts
        self._job_id = job_id
        self._start = datetime.now()
        self._start_flops = self._flops(start_samples)
        self._append(_START)

    def saved(self, iteration: int, samples: int, *, is_async: bool = False) -> None:
        """Add a complete save, or an asynchronous one that still runs during training."""
        if not self.is_open:
            return
        flops = self._flops(samples)
        job = self._tflops(flops - self._start_flops, since=self._start)
        since, flops_then = self._first_start()
        cumulative = self._tflops(flops - flops_then, since=since)
        self._append(
            f"{_SAVES[is_async]}\tIteration: {iteration}\t"
            f"Job throughput: {job:.1f} TFLOP/s/GPU\t"
            f"Cumulative throughput: {cumulative:.1f} TFLOP/s/GPU\t"
            f"{_FLOPS}{flops:.2e}\t"
            f"Tokens (in billions): {samples * self._facts.seq_length / 1e9:.2f}"
        )

    def finished(self, iteration: int) -> None:
        """Add the end of an asynchronous save; called by the thread that saved."""
        self._append(f"Saved async checkpoint\tIteration: {iteration}")

    def _flops(self, samples: int) -> float:
        return samples * self._facts.seq_length * self._facts.flops_per_token

    def _tflops(self, flops: float, *, since: datetime) -> float:
        """Compute TFLOP/s per device."""
        seconds = (datetime.now() - since).total_seconds()
        return flops / (seconds * 1e12 * self._facts.world_size) if seconds > 0 else 0.0

    def _first_start(self) -> tuple[datetime, float]:
        """Find the first of the last jobs on as many ranks: its start, and the FLOPs before."""
        try:
            lines = read_bytes(self._path).decode(errors="replace").splitlines()
        except (OSError, UserError):  # `_append` says so
            lines = []
        start: tuple[datetime, float] | None = None
        flops = 0.0
        for line in lines:
            fields = line.split("\t")
            try:
                begun = datetime.strptime(fields[0], _TIME)
                ranks = int(fields[2].removeprefix("# GPUs: "))
                if fields[3] in _SAVES:
                    flops = float(fields[7].removeprefix(_FLOPS))
            except (ValueError, IndexError):
                continue  # an incomplete line of a job that was killed
            if ranks != self._facts.world_size:
                start = None
            elif fields[3] == _START and start is None:
                start = (begun, flops)
        return start or (self._start, self._start_flops)

    def _append(self, text: str) -> None:
        now, ranks = datetime.now().strftime(_TIME), self._facts.world_size
        line = f"{now}\tJob ID: {self._job_id}\t# GPUs: {ranks}\t{text}\n"

        def write() -> None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(line)

        self.try_to(write)
