"""The logging flags as a dataclass: what a run reports, how often and where."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from paro.errors import check_least, check_positive


def run_record_path(metrics_file: str | Path) -> Path:
    """Return the path of the run record next to a metrics file."""
    return Path(f"{metrics_file}.run.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConfig:
    """The values of the logging flags."""

    log_interval: int = 100
    logging_level: int | None = None
    log_throughput: bool = False
    log_progress: bool = False
    metrics_file: str | None = None
    peak_tflops: float | None = None
    tensorboard_dir: str | None = None
    tensorboard_log_interval: int = 1
    tensorboard_queue_size: int = 1000
    wandb_project: str | None = None
    wandb_entity: str | None = None
    wandb_exp_name: str | None = None
    wandb_save_dir: str | None = None
    timing_log_level: int = 0
    timing_log_option: str = "minmax"
    log_timers_to_tensorboard: bool = False
    log_straggler: bool = False
    log_memory_interval: int | None = None
    terminal: str = "auto"

    def __post_init__(self) -> None:
        check_least(
            1,
            log_interval=self.log_interval,
            tensorboard_log_interval=self.tensorboard_log_interval,
            tensorboard_queue_size=self.tensorboard_queue_size,
            log_memory_interval=self.log_memory_interval,
            logging_level=self.logging_level,
        )
        check_positive(peak_tflops=self.peak_tflops)

    def without_records(self) -> ReportConfig:
        """Return a copy that prints everything, without files and dashboards."""
        return replace(self, metrics_file=None, tensorboard_dir=None, wandb_project=None)
