"""Turns the training loop's measurements into log lines, the metrics file and dashboards."""

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

if TYPE_CHECKING:  # rich may be missing
    from paro.report.live_view import LiveView


@dataclass(slots=True)
class Records:
    """The files that the first rank writes; one that fails is reported once, then not used.

    Nothing is written for a run that another one has replaced (`is_ours`): its successor writes the
    same files.
    """

    log: Log
    metrics: MetricsFile | None
    run: RunRecord | None
    is_ours: Callable[[], bool] = lambda: True

    def write(self, metrics: Metrics) -> None:
        if self.metrics is None or not self.is_ours():
            return
        try:
            self.metrics.write(metrics)
        except OSError as error:  # e.g. a full disk: this must not stop the training
            self.log.log0(f"--metrics-file is left out from here on: {describe(error)}")
            self.metrics = None

    def add(self, write: Callable[[RunRecord], None]) -> None:
        """Add to the run's record."""
        if self.run is None or not self.is_ours():
            return
        try:
            write(self.run)
        except OSError as error:
            told = describe(error)
            self.log.log0(f"the record of --metrics-file is left out from here on: {told}")
            self.run = None

    def close(self) -> None:
        if self.metrics is not None:
            self.metrics.close()


@dataclass(eq=False)
class Report:
    """One per rank; takes every iteration, prints on the last rank, writes files on the first.

    An iteration is logged if it is a multiple of --log-interval or the first that this process
    runs. Nothing here communicates, so ranks need not call it at the same time.
    """

    config: ReportConfig
    facts: RunFacts
    log: Log
    _: KW_ONLY
    device: torch.device
    records: Records
    dashboards: Dashboards
    view: LiveView | None = None  # set on the rank that draws
    is_live: bool = False
    forecast: MemoryForecast | None = None  # set where memory is logged

    def __post_init__(self) -> None:
        self._interval: list[IterationRecord] = []
        self._is_first = True
        self._doubts_speed = True
        self._time_left = TimeLeft(self.facts.train_iters)
        self._totals = {"skipped-iterations": 0, "nan-iterations": 0}
        self._num_seen = 0
        self._to_compare: list[IterationRecord] = []

    def start(self, choices: Mapping[str, str]) -> None:
        """Print the choices a reader needs to judge the numbers, one per line."""
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
        """Return whether the given next iteration will be logged; the same on all ranks."""
        return self._is_first or iteration % self.config.log_interval == 0

    def iteration(self, record: IterationRecord) -> None:
        """Record one iteration; print and write if that is due."""
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
        self.records.write(metrics)
        self._interval.clear()
        self._is_first = False

    def _compare(self, record: IterationRecord) -> None:
        """Say once, after the first iterations, how far the planner was off."""
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
        self.records.add(lambda run: run.measured(measured, peak))

    def ranks(
        self,
        record: IterationRecord,
        *,
        timers: Sequence[Mapping[str, float]],
        times: Sequence[RankTimes],
        iterations: int,
    ) -> None:
        """Print what all ranks measured since the last line, as far as flags enable it."""
        config = self.config
        if any(timers):
            option = config.timing_log_option
            self.log.log_last(timer_lines(timers, option=option, iterations=iterations))
        if config.log_straggler:
            self.log.log_last(straggler_line(times, iterations=iterations))
        if config.log_timers_to_tensorboard:
            names = dict.fromkeys(name for own in timers for name in own)
            slowest = {
                f"{name}-time": max(own.get(name, 0.0) for own in timers) / iterations
                for name in names
            }
            self.scalars(slowest, record.iteration, record.consumed_samples)

    def validation(self, found: Validation) -> None:
        """Print and write an evaluation."""
        name, loss = found.name, found.lm_loss
        self.log.log_last(validation_block(found))
        self._show(lambda view: view.validation(found))
        scalars: dict[str, float] = {}
        if loss is not None:
            scalars |= {f"lm loss {name}": loss, f"lm loss {name} ppl": perplexity(loss)}
        if found.bits_per_byte is not None:
            scalars[f"bits per byte {name}"] = found.bits_per_byte
        if scalars:
            self.scalars(scalars, found.iteration, found.consumed_samples)
        self.records.add(lambda run: run.validation(found))

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
        """Keep the view and a launcher's output at a signal from overwriting each other."""
        self._show(lambda view: view.begin_below())

    def close_view(self) -> None:
        """Leave the last state of the view on the terminal."""
        self._show(lambda view: view.close())

    def close(self) -> None:
        """Close files and dashboards; nothing is written afterwards."""
        self.close_view()
        self.records.close()
        self.dashboards.close()

    def _show(self, change: Callable[[LiveView], None]) -> None:
        if (view := self.view) is None:
            return
        try:
            change(view)
        except Exception as error:  # for example: the terminal is closed
            with suppress(Exception):
                view.close()
            self.view, self.is_live = None, False  # from here on lines
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
    """Return the report of a run that resumes after `start_iteration`; 0 for a fresh run.

    `is_ours` says whether no other run has replaced this one.
    """
    metrics_file = run_record = None
    if log.rank == 0 and config.metrics_file is not None:
        metrics_file = MetricsFile(
            config.metrics_file, start_iteration=start_iteration, say=log.log0
        )
        place = run_record_path(config.metrics_file)
        run_record = RunRecord(place, start_iteration=start_iteration)
        with writing(f"--metrics-file {config.metrics_file}: {place}"):
            run_record.start(arguments, facts, device)
    dashboards = open_dashboards(config, log, arguments, start_iteration=start_iteration)
    records = Records(log, metrics_file, run_record, is_ours)
    return Report(config, facts, log, device=device, records=records, dashboards=dashboards)
