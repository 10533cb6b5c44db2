"""progress.txt next to the checkpoints: every start and save of a run, with its throughput."""

# The lines have Megatron-LM's fields, so that tools for its file can read this one: time, job,
# ranks, event; for a save also the iteration, the throughput of this job and that since the first
# job on as many ranks (including time between jobs), the FLOPs and the tokens so far.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from pathlib import Path

from paro.errors import UserError, describe
from paro.report.log import Log
from paro.report.record import RunFacts
from paro.untrusted.regular_file import read_bytes

PROGRESS_FILE = "progress.txt"
_TIME = "%Y-%m-%d %H:%M:%S"
_START = "Starting job"
_SAVES = ("Saved checkpoint", "Saving async checkpoint")
_FLOPS = "Floating-point operations: "


@dataclass(eq=False)
class ProgressFile:
    """Megatron's progress.txt, by the first rank; after an I/O error it is not written."""

    folder: str
    facts: RunFacts
    log: Log
    _: KW_ONLY
    start_samples: int
    job_id: str
    clock: Callable[[], datetime] = datetime.now

    def __post_init__(self) -> None:
        self._path = Path(self.folder) / PROGRESS_FILE
        self._is_open = self.log.rank == 0
        self._start = self.clock()
        self._start_flops = self._flops(self.start_samples)
        if self._is_open:
            self._append(_START)

    def saved(self, iteration: int, samples: int, *, is_async: bool = False) -> None:
        """Add a complete save, or an asynchronous one that still runs during training."""
        if not self._is_open:
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
            f"Tokens (in billions): {samples * self.facts.seq_length / 1e9:.2f}"
        )

    def finished(self, iteration: int) -> None:
        """Add the end of an asynchronous save; called by the thread that saved."""
        if self._is_open:
            self._append(f"Saved async checkpoint\tIteration: {iteration}")

    def _flops(self, samples: int) -> float:
        return samples * self.facts.seq_length * self.facts.flops_per_token

    def _tflops(self, flops: float, *, since: datetime) -> float:
        """Compute TFLOP/s per device."""
        seconds = (self.clock() - since).total_seconds()
        return flops / (seconds * 1e12 * self.facts.world_size) if seconds > 0 else 0.0

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
            if ranks != self.facts.world_size:
                start = None
            elif fields[3] == _START and start is None:
                start = (begun, flops)
        return start or (self._start, self._start_flops)

    def _append(self, text: str) -> None:
        now = self.clock().strftime(_TIME)
        ranks = self.facts.world_size
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(f"{now}\tJob ID: {self.job_id}\t# GPUs: {ranks}\t{text}\n")
        except OSError as error:
            self._is_open = False
            self.log.log0(f"--log-progress is left out from here on: {describe(error)}")
