"""Report of a run: turns the training loop's measurements into log lines, files and dashboards."""

# The loop (paro/training/loop.py) makes an `IterationRecord` after every optimizer step and gives
# it to `Report.iteration` on all ranks, which never communicate here. Each output has one rank:
#
#     Megatron's log line           last rank, or first with a live view   log_line.py
#     live view of the terminal     first rank                             live_view.py
#     metrics file, run record      first rank                             run_files.py
#     TensorBoard, Weights & Biases rank of the log line                   dashboards.py
#
# `record.summarize` reduces the records of a logging interval to `Metrics`: the fields of the log
# line and of a line of the metrics file. An output that fails costs one line, and is left out from
# there on: it never stops the training.

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, asdict, dataclass
from datetime import datetime
from statistics import median
from typing import TYPE_CHECKING

import torch

from paro.errors import type_and_message, writing
from paro.report.config import ReportConfig, run_record_path
from paro.report.dashboards import Dashboards, open_dashboards
from paro.report.log import Log
from paro.report.log_line import (
    impossible_line,
    iteration_line,
    perplexity,
    straggler_line,
    timer_lines,
    validation_block,
)
from paro.report.memory import MemoryForecast, memory_line, peak_memory_bytes, peak_reserved_bytes
from paro.report.record import (
    IterationRecord,
    Metrics,
    PlannedStep,
    RankTimes,
    RunFacts,
    Validation,
    scalars_of,
    summarize,
)
from paro.report.run_files import MetricsFile, RunRecord
from paro.topology import PLANNED_WAITS, WaitKind

if TYPE_CHECKING:  # the package rich may not be installed
    from paro.report.live_view import LiveView


_ITERATIONS = 1000  # iterations that the time left averages over: one slow save has little effect
_SETTLED, _COMPARED = 10, 20  # iterations 11 to 20 are compared with the plan
_TOLERANCE = 0.15  # largest relative error of step time or memory without a warning
# Parts of a planned step, in words.
_PARTS = {"computing": "computing", **{k.value: PLANNED_WAITS[k.value].words for k in WaitKind}}


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
    dashboards: Dashboards
    metrics: MetricsFile | None = None  # the files of the run, on the first rank
    record: RunRecord | None = None
    view: LiveView | None = None  # the live view, on the rank that draws it
    forecast: MemoryForecast | None = None  # predicted memory; None: not known yet

    def __post_init__(self) -> None:
        self._interval: list[IterationRecord] = []  # iterations since the last log line
        self._is_first = True
        self._doubts_speed = True
        self._ends: deque[float] = deque(maxlen=_ITERATIONS + 1)  # times of ends of iterations
        self._totals = {"skipped-iterations": 0, "nan-iterations": 0}
        self._phase: str | None = None  # the data phase of the last iteration
        self._num_seen = 0  # iterations so far, until the comparison with the plan is printed
        self._to_compare: list[dict[str, float]] = []  # seconds of steps and of their parts

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
        phase = self.facts.phase_of(record.consumed_samples)
        if phase != self._phase:
            start = self.facts.phases[phase] if phase else 0
            self.log.log0(f"iteration {record.iteration}: data phase {phase}, after sample {start}")
            self._phase = phase
        due = self.is_due(record.iteration)
        alone = self._summarize([record])
        self._totals["skipped-iterations"] += alone.skipped_iterations
        self._totals["nan-iterations"] += alone.nan_iterations
        left = self._seconds_left(record)
        self._show(lambda view: view.iteration(record, alone, seconds_left=left))
        to_dashboards = due or record.iteration % self.config.tensorboard_log_interval == 0
        if to_dashboards and self.dashboards.any_open:
            values = scalars_of(record, alone, self.facts, totals=self._totals)
            self.dashboards.write(values, record.iteration, record.consumed_samples)
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
        if self.view is None or self.view.console.stderr:  # else it replaces the log lines
            self.log.log_last(line)
        if metrics.mfu_causal > 1.0 and self._doubts_speed:
            self.log.log_last(impossible_line(metrics, self.facts))
            self._doubts_speed = False
        if self.metrics is not None:
            self.metrics.write(metrics)
        self._interval.clear()
        self._is_first = False

    def _seconds_left(self, record: IterationRecord) -> float:
        """Estimate how long the run still takes, from the wall time between ends of iterations."""
        self._ends.append(time.monotonic())
        seconds = record.iteration_time_ms / 1000.0
        if len(self._ends) > 1:
            seconds = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return (self.facts.train_iters - record.iteration) * seconds

    def _compare(self, record: IterationRecord) -> None:
        """Print once, after the first iterations, how measured steps differ from the plan."""
        planned, forecast = self.facts.planned, self.forecast
        if planned is None or forecast is None or self._num_seen == _COMPARED:
            return
        self._num_seen += 1
        if self._num_seen > _SETTLED and record.global_batch_size == planned.global_batch_size:
            self._to_compare.append(_seconds_of(record))
        if self._num_seen < _COMPARED or not self._to_compare:
            return
        steps, peak = self._to_compare, peak_memory_bytes(self.device)
        measured = {name: median(step[name] for step in steps) for name in planned.seconds}
        planned_bytes = forecast.bytes_before + forecast.predicted_bytes
        for line in _comparison(planned, measured, peak, planned_bytes):
            self.log.log0(line)
        if self.record is not None:
            self.record.measured(measured, peak)

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
            self.dashboards.write(slowest, record.iteration, record.consumed_samples)

    def validation(self, validation: Validation) -> None:
        """Print and write an evaluation."""
        name, loss = validation.name, validation.lm_loss
        self.log.log_last(validation_block(validation))
        self._show(lambda view: view.validation(validation))
        scalars: dict[str, float] = {}
        if loss is not None:
            scalars |= {f"lm loss {name}": loss, f"lm loss {name} ppl": perplexity(loss)}
        if validation.ema_loss is not None:
            scalars[f"lm loss {name} ema"] = validation.ema_loss
        if validation.bits_per_byte is not None:
            scalars[f"bits per byte {name}"] = validation.bits_per_byte
        if scalars:
            self.dashboards.write(scalars, validation.iteration, validation.consumed_samples)
        if self.record is not None:
            self.record.validation(validation)

    def memory(self, *, iteration: int) -> None:
        """Print measured and predicted memory, on the first rank."""
        if self.forecast is not None:
            self.log.log0(memory_line(self.device, iteration=iteration, forecast=self.forecast))

    def interrupted(self) -> None:
        """Move the view below the lines that a launcher prints at a signal."""
        self._show(lambda view: view.begin_below())

    def close_view(self) -> None:
        """Leave the last state of the view on the terminal."""
        self._show(lambda view: view.close())

    def close(self) -> None:
        """Close files and dashboards; nothing is written afterwards."""
        self.close_view()
        if self.metrics is not None:
            self.metrics.close()
        self.dashboards.close()

    def _show(self, change: Callable[[LiveView], None]) -> None:
        if (view := self.view) is None:
            return
        try:
            change(view)
        except Exception as error:  # for example: the terminal is closed
            with suppress(Exception):
                view.close()
            self.view = None  # print log lines from here on
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


def _seconds_of(record: IterationRecord) -> dict[str, float]:
    """Return the seconds of a step and of its parts, named as in `PlannedStep.seconds`."""
    computing = (record.iteration_time_ms - record.data_wait_ms) / 1000.0 - record.exposed.total
    step = {"step": record.iteration_time_ms / 1000.0, "computing": computing}
    return step | asdict(record.exposed)


def _comparison(
    planned: PlannedStep, measured: Mapping[str, float], peak_bytes: int, planned_bytes: int
) -> Iterator[str]:
    """Yield a line of measured (planned) values, and a line for each part that is far off."""
    expected = planned.seconds
    parts = {name: words for name, words in _PARTS.items() if name in expected}
    texts = [f"{parts[name]} {measured[name]:.3g} ({expected[name]:.3g})" for name in parts]
    yield (
        f"> measured (and planned on machine {planned.machine}), in seconds: a step "
        f"{measured['step']:.3g} ({expected['step']:.3g}): {', '.join(texts)}; memory "
        f"{peak_bytes / 1e9:.3g} ({planned_bytes / 1e9:.3g}) GB"
    )
    step = max(measured["step"], expected["step"])
    for name, words in parts.items():
        more = measured[name] - expected[name]
        if abs(more) > _TOLERANCE * step:
            than = "more" if more > 0.0 else "less"
            how = "given this model's sizes, measures the device"
            if name != "computing":
                how = "launched as this run, measures the links"
            yield (
                f"> {words}: {abs(more):.3g} s {than} than planned; "
                f"tools/bench_collectives.py --machine-file, {how}"
            )
    if abs(peak_bytes - planned_bytes) > _TOLERANCE * planned_bytes:
        yield "> memory is not as planned; --log-memory-interval 1 measures it by kind"


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
    metrics = record = None
    if log.rank == 0 and (name := config.metrics_file) is not None:
        metrics = MetricsFile(name, log, is_ours, start_iteration=start_iteration)
        path = run_record_path(name)
        record = RunRecord(path, log, is_ours, start_iteration=start_iteration)
        with writing(f"--metrics-file {name}: {path}"):
            record.start(arguments, facts, device)
    boards = open_dashboards(config, log, arguments, start_iteration=start_iteration)
    return Report(
        config, facts, log, device=device, dashboards=boards, metrics=metrics, record=record
    )
