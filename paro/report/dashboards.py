"""TensorBoard and Weights & Biases, each on its own, under Megatron's tags."""

# Both packages are optional and both talk to disks and networks: a missing package or a failing
# write costs one printed line and that dashboard, never the training.

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from paro.report.config import ReportConfig
from paro.report.log import Log

Scalars = Mapping[str, float]


class Dashboard(Protocol):
    """What the report needs of either service."""

    name: str

    def write(self, scalars: Scalars, *, iteration: int, samples: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Each tag over iterations, and as `<tag> vs samples` over samples."""

    name = "TensorBoard"

    def __init__(self, folder: str, *, queue_size: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(log_dir=folder, max_queue=queue_size)

    def write(self, scalars: Scalars, *, iteration: int, samples: int) -> None:
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, iteration)
            self._writer.add_scalar(f"{tag} vs samples", value, samples)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Each tag over iterations, with the samples beside it."""

    name = "Weights & Biases"

    def __init__(self, config: ReportConfig, arguments: Mapping[str, object]) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=config.wandb_project,
            entity=config.wandb_entity,
            name=config.wandb_exp_name,
            dir=config.wandb_save_dir,
            config=dict(arguments),
        )

    def write(self, scalars: Scalars, *, iteration: int, samples: int) -> None:
        self._run.log({**scalars, "samples vs steps": samples}, step=iteration)

    def close(self) -> None:
        self._run.finish()


class Dashboards:
    """The dashboards that opened; one that fails is named once and left out from then on."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._open: list[Dashboard] = []

    def open(self, flag: str, make: Callable[[], Dashboard]) -> None:
        """Add what `make` returns, or say why `flag` has no effect."""
        try:
            self._open.append(make())
        except ImportError as error:
            self._log.log_last(f"{flag} has no effect: install {error.name} to use it")
        except Exception as error:
            self._log.log_last(f"{flag} has no effect: {_one_line(error)}")

    def write(self, scalars: Scalars, *, iteration: int, samples: int) -> None:
        self._each(lambda board: board.write(scalars, iteration=iteration, samples=samples))

    def close(self) -> None:
        self._each(lambda board: board.close())

    def _each(self, action: Callable[[Dashboard], None]) -> None:
        for board in tuple(self._open):
            try:
                action(board)
            except Exception as error:
                self._open.remove(board)
                self._log.log_last(f"{board.name} is left out from here on: {_one_line(error)}")


def open_dashboards(config: ReportConfig, log: Log, arguments: Mapping[str, object]) -> Dashboards:
    """The dashboards that were asked for; they live on the last rank alone."""
    dashboards = Dashboards(log)
    if log.rank != log.world_size - 1:
        return dashboards
    if config.tensorboard_dir is not None:
        folder, queue_size = config.tensorboard_dir, config.tensorboard_queue_size
        dashboards.open("--tensorboard-dir", lambda: TensorBoard(folder, queue_size=queue_size))
    if config.wandb_project is not None:
        dashboards.open("--wandb-project", lambda: WeightsAndBiases(config, arguments))
    return dashboards


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
