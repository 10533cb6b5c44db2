"""Sets up what a run trains with, and logs what was built: model, optimizer, states, data."""

from __future__ import annotations

from data.loader import Datasets
from paro.config.record import model_line, trained_lines
from paro.config.run import RunConfig
from paro.distributed.control import Control
from paro.distributed.process_group import seed_everything
from paro.errors import UserError
from paro.report.log import Log
from paro.training.assembly import build_data, build_training, initializer_of
from paro.training.kernels import agree_on_kernels
from paro.training.local_copies import LocalCopies
from paro.training.memory_check import check_memory
from paro.training.placement import check_placement, placement_lines
from paro.training.resume import load_run, tell_order
from paro.training.resumed import FROM_NOTHING, Resumed
from paro.training.step import Training, TrainState


def build(config: RunConfig, control: Control, log: Log) -> tuple[Training, list[str]]:
    """Builds model and optimizer and logs them; also returns the lines of the placement table."""
    with control.raise_on_all_ranks(name_rank=True):
        warning = check_memory(config, control.device)
    if warning is not None:
        log.log0(warning)
    with_kernels, lines = agree_on_kernels(config, control)
    for line in lines:
        log.log0(line)
    seed_everything(config.train.seed)
    training = build_training(with_kernels, control, initialized=False)
    placement = placement_lines(config, training)
    for line in (*config.notices, model_line(config), *trained_lines(config), *placement):
        log.log0(line)
    check_placement(config, training)
    return training, placement


def fill(config: RunConfig, training: Training, copies: LocalCopies | None, log: Log) -> Resumed:
    """Fills the run from local copies, else from --load, else with initial values.

    No initial value is drawn for what is filled.
    """
    recovered = copies.recover(training) if copies is not None else None
    if recovered is not None:
        return recovered
    draw, resumed = initializer_of(config), FROM_NOTHING
    if config.checkpoint.load is not None:
        if config.model.lora is not None:  # a checkpoint may have no adapters
            training.optimizer.initialize(draw, frozen=False)
        with training.control.raise_on_all_ranks():
            resumed = load_run(config, training, log)
    if resumed is FROM_NOTHING:
        training.optimizer.initialize(draw)
    return resumed


def open_data(
    config: RunConfig, state: TrainState, loaded: TrainState | None, log: Log
) -> Datasets:
    """The data sets of the run; logs it if their order changed since the checkpoint.

    `UserError` where --skip-train leaves nothing to evaluate.
    """
    datasets = build_data(config, state)
    held_out = datasets.valid or datasets.named_valid or datasets.test
    if config.train.skip_train and not held_out:
        split = config.data.split_in_use
        flags = f"--split {split}" if split else "--valid-data-path and --test-data-path"
        raise UserError(
            f"--skip-train has nothing to evaluate: {flags} leaves no sample for validation or test"
        )
    if loaded is not None and not config.train.skip_train:
        tell_order(config, loaded, datasets, log)
    return datasets
