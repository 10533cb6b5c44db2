"""Report of a run: turns the training loop's measurements into log lines, files and dashboards."""

# The loop (paro/training/loop.py) makes an `IterationRecord` after every optimizer step and gives
# it to `Report.iteration` on all ranks, which never communicate here. Each output has one rank:
#
#     Megatron's log line           last rank, or first with a live view   log_line.py
#     live view of the terminal     first rank                             live_view.py
#     metrics file, run record      first rank                             metrics.py, run_record.py
#     TensorBoard, Weights & Biases rank of the log line                   dashboards.py
#
# `record.summarize` reduces the records of a logging interval to `Metrics`: the fields of the log
# line and of a line of the metrics file. An output that fails costs one line, and is left out from
# there on: it never stops the training.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import torch

from paro.errors import describe, type_and_message, writing
from paro.report.config import ReportConfig, run_record_path
from paro.report.dashboards import Dashboards, open_dashboards
from paro.report.log import Log
from paro.report.log_line import (
    TimeLeft,
    impossible_line,
    iteration_line,
    perplexity,
    straggler_line,
    timer_lines,
    validation_block,
)
from paro.report.memory import MemoryForecast, memory_line, peak_memory_bytes, peak_reserved_bytes
from paro.report.metrics import MetricsFile
from paro.report.planned_step import COMPARED, SETTLED, comparison, measured_seconds
from paro.report.record import (
    IterationRecord,
    Metrics,
    RankTimes,
    RunFacts,
    Validation,
    scalars_of,
    summarize,
)
from paro.report.run_record import RunRecord

if TYPE_CHECKING:  # the package rich may not be installed
    from paro.report.live_view import LiveView


class RunFiles:
    """The metrics file and the run record, on the first rank.

    `is_ours` returns False once a successor has taken the files over; then nothing is written.
    """

    def __init__(
        self,
        log: Log,
        metrics: MetricsFile | None = None,
        record: RunRecord | None = None,
        is_ours: Callable[[], bool] = lambda: True,
    ) -> None:
        self._log = log
        self._metrics = metrics
        self._record = record
        self._is_ours = is_ours

    def write_metrics(self, metrics: Metrics) -> None:
        """Append a line to the metrics file."""
        file = self._metrics
        if file and not self._succeeds(lambda: file.write(metrics), "--metrics-file"):
            self._metrics = None

    def write_record(self, write: Callable[[RunRecord], None]) -> None:
        """Change the run's record by `write`."""
        record = self._record
        if record and not self._succeeds(lambda: write(record), "the record of --metrics-file"):
            self._record = None

    def _succeeds(self, write: Callable[[], None], name: str) -> bool:
        """Write unless a successor owns the files; print a line on failure, such as a full disk."""
        if not self._is_ours():
            return True
        try:
            write()
        except OSError as error:
            self._log.log0(f"{name} is left out from here on: {describe(error)}")
            return False
        return True

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()


@dataclass(eq=False)
class Report:
    """The report of one rank, which receives every iteration of the training loop.

    Logged iterations are multiples of --log-interval, and the first iteration of this process.
    """

    config: ReportConfig
    facts: RunFacts
    log: Log
    _: KW_ONLY
    device: torch.device
    files: RunFiles
    dashboards: Dashboards
    view: LiveView | None = None  # the live view, on the rank that draws it
    is_live: bool = False  # True: a view on some rank replaces the log lines
    forecast: MemoryForecast | None = None  # predicted memory; None: not known yet

    def __post_init__(self) -> None:
        self._interval: list[IterationRecord] = []  # iterations since the last log line
        self._is_first = True
        self._doubts_speed = True
        self._time_left = TimeLeft(self.facts.train_iters)
        self._totals = {"skipped-iterations": 0, "nan-iterations": 0}
        self._num_seen = 0  # iterations so far, until the comparison with the plan is printed
        self._to_compare: list[IterationRecord] = []

    def start(self, choices: Mapping[str, str]) -> None:
        """Print the facts that the run's numbers depend on, one per line."""
        facts = self.facts
        lines = {
            **choices,
            "FLOPs per token": (
                f"{facts.flops_per_token:.4E} forward and backward (mfu); "
                f"{facts.flops_per_token_causal:.4E} with causal attention halved (mfu_causal); "
                "matmuls alone, recomputation not counted"
            ),
            "peak of one device": (
                f"{facts.peak.flops_per_second / 1e12:.3f} TFLOP/s, {facts.peak.source}"
            ),
        }
        for name, text in lines.items():
            self.log.log0(f"> {name}: {text}")

    def is_due(self, iteration: int) -> bool:
        """Return whether the next iteration, `iteration`, will be logged; all ranks agree."""
        return self._is_first or iteration % self.config.log_interval == 0

    def iteration(self, record: IterationRecord) -> None:
        """Add one iteration; write a log line if one is due."""
        self._interval.append(record)
        self._compare(record)
        due = self.is_due(record.iteration)
        alone = self._summarize([record])
        self._totals["skipped-iterations"] += alone.skipped_iterations
        self._totals["nan-iterations"] += alone.nan_iterations
        left = self._time_left.after(record.iteration, seconds=record.iteration_time_ms / 1000.0)
        self._show(lambda view: view.iteration(record, alone, seconds_left=left))
        to_dashboards = due or record.iteration % self.config.tensorboard_log_interval == 0
        if to_dashboards and self.dashboards.any_open:
            values = scalars_of(record, alone, self.facts, totals=self._totals)
            self.scalars(values, record.iteration, record.consumed_samples)
        if not due:
            return
        metrics = self._summarize(self._interval)
        line = iteration_line(
            self._interval,
            metrics,
            self.facts,
            with_throughput=self.config.log_throughput,
            seconds_left=left,
            now=datetime.now(),
        )
        if not self.is_live:
            self.log.log_last(line)
        if metrics.mfu_causal > 1.0 and self._doubts_speed:
            self.log.log_last(impossible_line(metrics, self.facts))
            self._doubts_speed = False
        self.files.write_metrics(metrics)
        self._interval.clear()
        self._is_first = False

    def _compare(self, record: IterationRecord) -> None:
        """Print once, after the first iterations, how measured steps differ from the plan."""
        planned, forecast = self.facts.planned, self.forecast
        if planned is None or forecast is None or self._num_seen == COMPARED:
            return
        self._num_seen += 1
        if self._num_seen > SETTLED and record.global_batch_size == planned.global_batch_size:
            self._to_compare.append(record)
        if self._num_seen < COMPARED or not self._to_compare:
            return
        measured, peak = measured_seconds(self._to_compare, planned), peak_memory_bytes(self.device)
        for line in comparison(
            planned,
            measured,
            peak_bytes=peak,
            planned_bytes=forecast.bytes_before + forecast.predicted_bytes,
        ):
            self.log.log0(line)
        self.files.write_record(lambda run: run.measured(measured, peak))

    def ranks(
        self,
        record: IterationRecord,
        *,
        timers: Sequence[Mapping[str, float]],
        times: Sequence[RankTimes],
        iterations: int,
    ) -> None:
        """Print timers and stragglers of all ranks since the last line, if flags enable them."""
        config = self.config
        if any(timers):
            option = config.timing_log_option
            self.log.log_last(timer_lines(timers, option=option, iterations=iterations))
        if config.log_straggler:
            self.log.log_last(straggler_line(times, iterations=iterations))
        if config.log_timers_to_tensorboard:
            names = dict.fromkeys(name for of_rank in timers for name in of_rank)
            slowest = {
                f"{name}-time": max(of_rank.get(name, 0.0) for of_rank in timers) / iterations
                for name in names
            }
            self.scalars(slowest, record.iteration, record.consumed_samples)

    def validation(self, validation: Validation) -> None:
        """Print and write an evaluation."""
        name, loss = validation.name, validation.lm_loss
        self.log.log_last(validation_block(validation))
        self._show(lambda view: view.validation(validation))
        scalars: dict[str, float] = {}
        if loss is not None:
            scalars |= {f"lm loss {name}": loss, f"lm loss {name} ppl": perplexity(loss)}
        if validation.bits_per_byte is not None:
            scalars[f"bits per byte {name}"] = validation.bits_per_byte
        if scalars:
            self.scalars(scalars, validation.iteration, validation.consumed_samples)
        self.files.write_record(lambda run: run.validation(validation))

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int) -> None:
        """Write values to the dashboards."""
        self.dashboards.write(values, iteration=iteration, samples=samples)

    def memory(self, *, iteration: int) -> None:
        """Print measured and predicted memory, on the first rank."""
        if self.forecast is not None:
            device, rank = self.device, self.log.rank
            line = memory_line(device, rank=rank, iteration=iteration, forecast=self.forecast)
            self.log.log0(line)

    def interrupted(self) -> None:
        """Move the view below the lines that a launcher prints at a signal."""
        self._show(lambda view: view.begin_below())

    def close_view(self) -> None:
        """Leave the last state of the view on the terminal."""
        self._show(lambda view: view.close())

    def close(self) -> None:
        """Close files and dashboards; nothing is written afterwards."""
        self.close_view()
        self.files.close()
        self.dashboards.close()

    def _show(self, change: Callable[[LiveView], None]) -> None:
        if (view := self.view) is None:
            return
        try:
            change(view)
        except Exception as error:  # for example: the terminal is closed
            with suppress(Exception):
                view.close()
            self.view, self.is_live = None, False  # print log lines from here on
            self.log.log_last(
                f"--terminal live is left out from here on: {type_and_message(error)}"
            )

    def _summarize(self, interval: Sequence[IterationRecord]) -> Metrics:
        return summarize(
            interval,
            self.facts,
            peak_memory_bytes=peak_memory_bytes(self.device),
            peak_reserved_bytes=peak_reserved_bytes(self.device),
        )


def open_report(
    config: ReportConfig,
    facts: RunFacts,
    log: Log,
    *,
    device: torch.device,
    start_iteration: int,
    arguments: Mapping[str, object],
    is_ours: Callable[[], bool] = lambda: True,
) -> Report:
    """Open the report of a run that resumes after `start_iteration`; 0 for a fresh run.

    `is_ours` returns False once another run has replaced this run.
    """
    files = RunFiles(log)
    if log.rank == 0 and (name := config.metrics_file) is not None:
        metrics = MetricsFile(name, start_iteration=start_iteration, say=log.log0)
        path = run_record_path(name)
        record = RunRecord(path, start_iteration=start_iteration)
        with writing(f"--metrics-file {name}: {path}"):
            record.start(arguments, facts, device)
        files = RunFiles(log, metrics, record, is_ours)
    dashboards = open_dashboards(config, log, arguments, start_iteration=start_iteration)
    return Report(config, facts, log, device=device, files=files, dashboards=dashboards)
