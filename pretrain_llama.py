"""Entry point: pre-trains a LLaMA, started with python, torchrun or srun; see --help."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from data.loader import Datasets
from data.waits import Wait
from model.config import num_parameters
from paro.arguments.parser import parse_args
from paro.checkpoint.claim import Claim, claimed
from paro.config.mistakes import wrong_values
from paro.config.record import model_line, precision_line, recorded_arguments, trained_lines
from paro.config.run import RunConfig, take_watch, take_world
from paro.config.settings import settings_of
from paro.distributed.agent import end_with_agent
from paro.distributed.control import Control
from paro.distributed.process_group import RuntimeConfig, distributed, seed_everything
from paro.distributed.rendezvous import refusals_are_shared
from paro.distributed.user_errors import run_script
from paro.distributed.world import World, read_job_id, world_or_alone
from paro.errors import RunError, UserError
from paro.report.config import ReportConfig
from paro.report.dashboards import check_login
from paro.report.log import Log, set_logging_level
from paro.report.log_line import arguments_block
from paro.report.memory import resident_bytes
from paro.report.observer import Observer
from paro.report.profiler import MemoryHistory, Profiler
from paro.report.progress import ProgressFile
from paro.report.record import RunFacts
from paro.report.report import Report, open_report
from paro.report.terminal import Terminal, live_is_wanted
from paro.report.watchdog import WatchConfig, Watchdog
from paro.training.assembly import (
    build_data,
    build_sources,
    build_training,
    initializer_of,
    run_facts,
    start_state,
)
from paro.training.changed_flags import order_record
from paro.training.dry_run import run_dry
from paro.training.kernels import agree_on_kernels
from paro.training.local_copies import LocalCopies, local_copies
from paro.training.loop import Loop, Saving
from paro.training.memory_check import check_memory
from paro.training.placement import (
    check_placement,
    forecast_of,
    placement_lines,
    predict_memory,
    predicted_bytes,
)
from paro.training.resume import Saver, check_source, load_run, tell_order
from paro.training.resumed import FROM_NOTHING, Resumed
from paro.training.step import Training, TrainState


def main() -> None:
    end_with_agent()
    with refusals_are_shared():
        with early_watchdog():
            args = parse_args(wrong_values=wrong_values)
        world = take_world(args)
        watchdog = watchdog_of(args, world)
    with watchdog:
        watchdog.begins("checking the flags and the files that they name", 0)
        with refusals_are_shared():
            config = RunConfig.from_args(args, world)
        if config.launch.dry_run:
            watchdog.close()
            run_dry(config, world)
            return
        set_logging_level(config.report.logging_level)
        watchdog.begins("meeting the other ranks", 0)
        settings = settings_of(config) if world.size > 1 else {}
        with distributed(config.runtime, world, settings) as control:
            check_source(config.checkpoint, config.train, control)
            watchdog.begins("claiming the folder of --save", 0)
            # Before anything is read or written there.
            with claim_of(config, control, watchdog) as claim:
                log = Log(rank=world.rank, world_size=world.size)
                with local_copies(config, control, log) as copies:
                    run(config, control, claim, copies, watchdog)


@contextmanager
def claim_of(config: RunConfig, control: Control, watchdog: Watchdog) -> Iterator[Claim | None]:
    """Holds the lease of --save in the block; None for a run that does not save."""
    if config.checkpoint.save is None or config.train.skip_train:
        yield None
        return
    log = Log(rank=control.world.rank, world_size=control.world.size)
    with claimed(
        Path(config.checkpoint.save), control, log.log0, progressed=watchdog.progressed
    ) as claim:
        yield claim


@contextmanager
def early_watchdog() -> Iterator[None]:
    """Watches the block with the default limits: the file of --yaml-cfg may not answer."""
    minutes = RuntimeConfig().distributed_timeout_minutes
    rank = world_or_alone().rank
    with Watchdog(WatchConfig(), rank=rank, timeout_minutes=minutes) as watchdog:
        watchdog.begins("reading the flags", 0)
        yield


def watchdog_of(args: Namespace, world: World) -> Watchdog:
    """The watchdog of this process, from before anything that may hang; sets the limit of waits."""
    watch, runtime = take_watch(args)
    Wait.limit_seconds = runtime.timeout.total_seconds()
    return Watchdog(
        watch,
        rank=world.rank,
        timeout_minutes=runtime.distributed_timeout_minutes,
        flight_dir=runtime.flight_recorder_dir,
    )


def run(
    config: RunConfig,
    control: Control,
    claim: Claim | None,
    copies: LocalCopies | None,
    watchdog: Watchdog,
) -> None:
    """Builds all parts of the run, logs what was built, then trains or only evaluates."""
    only_evaluate = config.train.skip_train
    terminal = Terminal()
    is_live = live_is_wanted(config.report.terminal, control) and not only_evaluate
    log = log_of(control, terminal, one_speaker=is_live)
    with control.raise_on_all_ranks():
        check_login(report_config(config), log)
    log.log0(arguments_block(recorded_arguments(config)))
    watchdog.begins("building and loading the model", 0)
    bytes_before = resident_bytes(control.device)
    training, placement = build(config, control, log)

    resumed = resume(config, training, copies, log)
    state = resumed.state or start_state(config)
    config.batches.check_from(state.consumed_train_samples)
    loaded = None if resumed.recovery is not None else resumed.state
    if only_evaluate:
        state.consumed_valid_samples = 0  # the same samples for every checkpoint
    watchdog.begins("opening the data sets and the report", state.iteration)
    with control.raise_on_all_ranks():
        datasets = open_data(config, state, loaded, log)
    for line in (*datasets.describe(), f"[after dataloaders are built] datetime: {datetime.now()}"):
        log.log0(line)
    sources = build_sources(config, datasets, training, state)

    with control.raise_on_all_ranks():
        watchdog.open_heartbeat(config.watch)
        observers = (watchdog, *profilers_of(config, log, training))
    report, facts = start_report(config, training, state, claim, log, bytes_before)
    if (recovery := resumed.recovery) is not None:
        report.scalars(recovery.panel(), state.iteration, state.consumed_train_samples)
    order = order_record(config, datasets)
    if copies is not None:
        copies.begin(training, order, resumed)
    loop = Loop(
        training,
        state,
        sources,
        report,
        saving=saving_of(config, training, facts, log, resumed, order, claim),
        copies=copies,
        observers=observers,
    )
    report.is_live = is_live and not terminal.keeps_lines
    if is_live and log.is_last:
        report.view = terminal.open_view(
            facts, title=title_of(config), placement=placement, bytes_before=bytes_before
        )
    train(loop, report, config, control)


def resume(config: RunConfig, training: Training, copies: LocalCopies | None, log: Log) -> Resumed:
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


def start_report(
    config: RunConfig,
    training: Training,
    state: TrainState,
    claim: Claim | None,
    log: Log,
    bytes_before: int,
) -> tuple[Report, RunFacts]:
    """Opens the report and logs what its numbers depend on; collective."""
    memory = predict_memory(config, training)
    facts = run_facts(config, training, predicted_bytes(memory), state=state)
    with training.control.raise_on_all_ranks():
        report = open_report(
            report_config(config),
            facts,
            log,
            device=training.device,
            start_iteration=state.iteration,
            arguments=recorded_arguments(config),
            is_ours=(lambda: True) if claim is None else claim.is_ours,
        )
    report.forecast = forecast_of(memory, bytes_before)
    report.start({"precision": precision_line(config), "memory": memory.describe()})
    return report, facts


def report_config(config: RunConfig) -> ReportConfig:
    """What is reported, and where; a run that only evaluates leaves no records."""
    return config.report.without_records() if config.train.skip_train else config.report


def train(loop: Loop, report: Report, config: RunConfig, control: Control) -> None:
    """Runs the loop; for a run that ended early, logs how to continue it."""
    with closing(report, control):
        is_complete = loop.run()
    if not is_complete:
        report.log.log0(how_to_continue(config, loop.state))
    if control.device.type == "cuda":
        loop.training.close()  # gloo's groups end with the process


def build(config: RunConfig, control: Control, log: Log) -> tuple[Training, list[str]]:
    """Builds model and optimizer and logs them; also returns the lines of the placement table."""
    with control.raise_on_all_ranks(name_rank=True):
        warning = check_memory(config, control.world, control.device)
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


@contextmanager
def closing(report: Report, control: Control) -> Iterator[None]:
    """Closes the report at the end, also after an error of all ranks: dashboards record it."""
    try:
        yield
    except (UserError, RunError) as error:
        # All ranks raise it, or only this one: then the others do not reach the barrier.
        if isinstance(error, RunError) or not error.on_this_rank:
            with suppress(Exception):  # it must not hide the error
                report.close()
                control.barrier()  # the first rank to exit kills the others
        raise
    except KeyboardInterrupt:
        report.interrupted()
        if report.view is not None:
            report.view.close()
        raise
    report.close()


def how_to_continue(config: RunConfig, state: TrainState) -> str:
    """The last log line of a run that ended early: where it is saved, how to continue."""
    checkpoint = config.checkpoint
    if checkpoint.save is None:
        return f"iteration {state.iteration} is not saved: there was no --save"
    saved = f"iteration {state.iteration} is saved in {checkpoint.save}"
    if checkpoint.continues:
        return f"{saved}: the same command continues from there"
    without = [flag for flag in ("finetune", "start_over") if getattr(checkpoint, flag)]
    words = "".join(f" and leave --{flag.replace('_', '-')} out" for flag in without)
    return f"{saved}: to continue give --load {checkpoint.save}{words}"


def log_of(control: Control, terminal: Terminal, *, one_speaker: bool) -> Log:
    rank, world_size = control.world.rank, control.world.size
    return Log(rank=rank, world_size=world_size, one_speaker=one_speaker, write=terminal.show)


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


def profilers_of(config: RunConfig, log: Log, training: Training) -> tuple[Observer, ...]:
    """What observes the loop in addition to the report and the watchdog."""
    folder = config.report.tensorboard_dir or config.checkpoint.save
    return (
        Profiler(config.profile, log, folder=folder),
        MemoryHistory(config.profile, log, training.device),
    )


def title_of(config: RunConfig) -> str:
    """The title of the terminal view: model size and strategy."""
    millions = num_parameters(config.model) / 1e6
    return f"LLaMA, {millions:,.1f}M parameters, {config.strategy.name}"


def saving_of(
    config: RunConfig,
    training: Training,
    facts: RunFacts,
    log: Log,
    resumed: Resumed,
    order: Mapping[str, Any],
    claim: Claim | None,
) -> Saving | None:
    """How and when the run is saved, or None; what was loaded from --save is not saved again."""
    checkpoint = config.checkpoint
    if checkpoint.save is None or claim is None:
        return None
    loaded, progress = resumed.state, None
    if config.report.log_progress:
        start = 0 if loaded is None else loaded.consumed_train_samples
        progress = ProgressFile(
            checkpoint.save, facts, log, start_samples=start, job_id=read_job_id()
        )
    saver = Saver(
        config,
        training,
        log,
        claim,
        progress=progress,
        order=order,
        resumed=resumed,
    )
    return Saving(
        write=saver.save,
        interval=checkpoint.save_interval,
        saved_iteration=resumed.saved_iteration(config),
        settle=saver.settle,
        failed=lambda: saver.failed,
        way_back=saver.way_back,
    )


def command() -> NoReturn:
    """The script and the console command `pretrain-llama`; ends the process with an exit status."""
    run_script("pretrain_llama.py", main)


if __name__ == "__main__":
    command()
