"""Turns what the training loop measures into log lines, the metrics file and dashboards."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

import torch

from paro.report.config import ReportConfig
from paro.report.dashboards import Dashboards, open_dashboards
from paro.report.log import Log
from paro.report.log_line import iteration_line, perplexity, validation_block
from paro.report.memory import MemoryForecast, memory_line, peak_memory_bytes
from paro.report.metrics import MetricsFile
from paro.report.record import IterationRecord, Metrics, RunFacts, summarize


class Report:
    """One per rank; hears of every iteration, prints on the last rank, writes on the first.

    An iteration is logged when it is a multiple of --log-interval, and when it is the first that
    this process runs. Nothing here communicates, so ranks call at their own pace.
    """

    def __init__(
        self,
        config: ReportConfig,
        facts: RunFacts,
        log: Log,
        *,
        device: torch.device,
        metrics_file: MetricsFile | None,
        dashboards: Dashboards,
    ) -> None:
        self.log = log
        self._config = config
        self._facts = facts
        self._device = device
        self._metrics_file = metrics_file
        self._dashboards = dashboards
        self._interval: list[IterationRecord] = []
        self._is_first = True

    def start(self, choices: Mapping[str, str]) -> None:
        """Print the choices a reader needs to judge the numbers, one line each."""
        facts = self._facts
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

    def iteration(self, record: IterationRecord) -> None:
        """Take in one iteration; print and write where that is due."""
        self._interval.append(record)
        due = self._is_first or record.iteration % self._config.log_interval == 0
        if due or record.iteration % self._config.tensorboard_log_interval == 0:
            self._write_dashboards(record)
        if not due:
            return
        memory = peak_memory_bytes(self._device)
        metrics = summarize(self._interval, self._facts, peak_memory_bytes=memory)
        line = iteration_line(
            self._interval,
            metrics,
            self._facts,
            with_throughput=self._config.log_throughput,
            now=datetime.now(),
        )
        self.log.log_last(line)
        self._write_metrics(metrics)
        self._interval.clear()
        self._is_first = False

    def validation(
        self, *, iteration: int, samples: int, lm_loss: float, data_set: str | None = None
    ) -> None:
        """Print an evaluation; `data_set` names it where there are several, or after training."""
        self.log.log_last(validation_block(iteration=iteration, lm_loss=lm_loss, data_set=data_set))
        tag = f"lm loss {data_set or 'validation'}"
        scalars = {tag: lm_loss, f"{tag} ppl": perplexity(lm_loss)}
        self._dashboards.write(scalars, iteration=iteration, samples=samples)

    def memory(self, *, iteration: int, forecast: MemoryForecast) -> None:
        """Print memory as measured beside what was predicted, on the first rank."""
        rank = self.log.rank
        self.log.log0(memory_line(self._device, rank=rank, iteration=iteration, forecast=forecast))

    def close(self) -> None:
        """Finish files and dashboards; nothing is written afterwards."""
        if self._metrics_file is not None:
            self._metrics_file.close()
        self._dashboards.close()

    def _write_metrics(self, metrics: Metrics) -> None:
        if self._metrics_file is None:
            return
        try:
            self._metrics_file.write(metrics)
        except OSError as error:  # a full disk: the model matters more than its metrics
            self.log.log0(f"--metrics-file is left out from here on: {error}")
            self._metrics_file = None

    def _write_dashboards(self, record: IterationRecord) -> None:
        memory = peak_memory_bytes(self._device)
        metrics = summarize([record], self._facts, peak_memory_bytes=memory)
        scalars = {
            "learning-rate": record.learning_rate,
            "batch-size": record.global_batch_size,
            "loss-scale": record.loss_scale,
            "world-size": self._facts.world_size,
            "grad-norm": record.grad_norm,
            "iteration-time": record.iteration_time_ms / 1000.0,
            "data-wait-time": record.data_wait_ms / 1000.0,
            "throughput": metrics.tflops_per_device,
            "tokens-per-second": metrics.tokens_per_second,
            "mfu": metrics.mfu,
            "mem-max-allocated-bytes": memory,
        }
        if not record.skipped:
            scalars["lm loss"] = record.lm_loss
        for tag, value in (("num-zeros", record.num_zeros), ("params-norm", record.params_norm)):
            if value is not None:
                scalars[tag] = value
        self._dashboards.write(scalars, iteration=record.iteration, samples=record.consumed_samples)


def open_report(
    config: ReportConfig,
    facts: RunFacts,
    log: Log,
    *,
    device: torch.device,
    start_iteration: int,
    arguments: Mapping[str, object],
) -> Report:
    """The report of a run that goes on after `start_iteration`; 0 for a fresh one."""
    metrics_file = None
    if log.rank == 0 and config.metrics_file is not None:
        metrics_file = MetricsFile(config.metrics_file, start_iteration=start_iteration)
    return Report(
        config,
        facts,
        log,
        device=device,
        metrics_file=metrics_file,
        dashboards=open_dashboards(config, log, arguments),
    )
