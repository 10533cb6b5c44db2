"""progress.txt next to the checkpoints: every start and save of a run, with its throughput."""

# The lines have Megatron-LM's fields, so that tools for its file can read this one: time, job,
# ranks, event; for a save also the iteration, the throughput of this job and that since the first
# job on as many ranks (including time between jobs), the FLOPs and the tokens so far.

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from paro.errors import UserError
from paro.report.log import Log
from paro.report.record import RunFacts
from paro.report.run_files import RunFile
from paro.untrusted.regular_file import read_bytes

PROGRESS_FILE = "progress.txt"
_TIME = "%Y-%m-%d %H:%M:%S"
_START = "Starting job"
_SAVES = ("Saved checkpoint", "Saving async checkpoint")
_FLOPS = "Floating-point operations: "


class ProgressFile(RunFile):
    """Megatron's progress.txt in the folder of --save, by the first rank."""

    def __init__(
        self,
        folder: str,
        facts: RunFacts,
        log: Log,
        *,
        start_samples: int,
        job_id: str,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        super().__init__("--log-progress", log)
        self.is_open = log.rank == 0
        self._path = Path(folder) / PROGRESS_FILE
        self._facts = facts
        self._job_id = job_id
        self._clock = clock
        self._start = clock()
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
        seconds = (self._clock() - since).total_seconds()
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
        now, ranks = self._clock().strftime(_TIME), self._facts.world_size
        line = f"{now}\tJob ID: {self._job_id}\t# GPUs: {ranks}\t{text}\n"

        def write() -> None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(line)

        self.try_to(write)
