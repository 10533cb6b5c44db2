"""Entry point: pre-trains a LLaMA, started with python, torchrun or srun; see --help."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from typing import NoReturn

from paro.arguments.parser import parse_args
from paro.checkpoint.agreement import LockedFolders, lock_folders
from paro.checkpoint.config import CheckpointConfig
from paro.config.mistakes import wrong_values
from paro.config.record import recorded_arguments, settings_of
from paro.config.run import RunConfig, configure, take_early
from paro.distributed.control import Control
from paro.distributed.process_group import distributed
from paro.distributed.rendezvous import refusals_are_shared
from paro.distributed.user_errors import end_with_agent, run_script
from paro.launch import setup
from paro.launch.dry_run import run_dry
from paro.measuring.start import plan_on_this_machine
from paro.report.dashboards import check_login
from paro.report.log import Log, Terminal, live_is_wanted, set_logging_level
from paro.report.log_line import arguments_block
from paro.report.memory import resident_bytes
from paro.report.profiler import MemoryHistory, Profiler
from paro.report.report import Report
from paro.report.watchdog import Watchdog
from paro.training.assembly import build_sources
from paro.training.export import prepare_export
from paro.training.in_memory import InMemoryCheckpointer, in_memory_checkpoints
from paro.training.loop import Loop
from paro.training.resume import check_source
from paro.training.saving import Saver
from paro.training.step import TrainState


def main() -> None:
    end_with_agent()
    with refusals_are_shared():
        with setup.early_watchdog():
            args = parse_args(wrong_values=wrong_values)
        early = take_early(args)
        watchdog = setup.watchdog_of(early)
    with watchdog:
        watchdog.begins("checking the flags and the files that they name", 0)
        with refusals_are_shared():
            config = configure(args, early)
        if config.launch.dry_run:
            watchdog.close()
            run_dry(config)
            return
        set_logging_level(config.report.logging_level)
        watchdog.begins("meeting the other ranks", 0)
        world = config.world
        settings = settings_of(config) if world.size > 1 else {}
        with distributed(config.runtime, world, settings) as control:
            check_source(config.checkpoint, config.train, control)
            watchdog.begins("claiming the folder of --save", 0)
            log = Log(rank=world.rank, world_size=world.size)
            # Lock --save before anything is read from it or written to it.
            lock: AbstractContextManager[LockedFolders | None] = nullcontext()
            if (folder := config.save_folder) is not None:
                lock = lock_folders(folder, control, log.log0, watchdog.progressed)
            with lock as locked:
                chosen = plan_on_this_machine(config, control, watchdog)
                if chosen is None:
                    return
                with in_memory_checkpoints(chosen, control, log) as snapshots:
                    run(chosen, control, locked, snapshots, watchdog)


def run(
    config: RunConfig,
    control: Control,
    locked: LockedFolders | None,
    snapshots: InMemoryCheckpointer | None,
    watchdog: Watchdog,
) -> None:
    """Build all parts of the run, log them, then train or only evaluate."""
    only_evaluate = config.train.skip_train
    terminal = Terminal()
    is_live = live_is_wanted(config.report.terminal, control) and not only_evaluate
    rank, size = control.world.rank, control.world.size
    log = Log(rank=rank, world_size=size, one_speaker=is_live, write=terminal.show)
    with control.raise_on_all_ranks():
        check_login(config.report_in_use, log)
    log.log0(arguments_block(recorded_arguments(config)))
    watchdog.begins("building and loading the model", 0)
    bytes_before = resident_bytes(control.device)
    training, placement = setup.build(config, control, log)

    resumed = setup.fill(config, training, snapshots, log)
    state = resumed.state or TrainState.at_start(config.loss_scale)
    config.batches.check_from(state.consumed_train_samples)
    if only_evaluate:
        state.consumed_valid_samples = 0  # evaluate every checkpoint on the same samples
    watchdog.begins("opening the data sets and the report", state.iteration)
    with control.raise_on_all_ranks():
        datasets, resumed = setup.open_data(config, state, resumed, log)
    log.log0(*datasets.describe(), f"[after dataloaders are built] datetime: {datetime.now()}")
    sources = build_sources(config, datasets, training, state, trained_on=resumed.trained_on)

    with control.raise_on_all_ranks():
        watchdog.open_heartbeat(config.watch)
        folder = config.report.tensorboard_dir or config.checkpoint.save
        profiler = Profiler(config.profile, log, folder=folder)
        observers = (watchdog, profiler, MemoryHistory(config.profile, log, control.device))
    report = setup.start_report(config, training, state, resumed.start, locked, log, bytes_before)
    if (recovery := resumed.recovery) is not None:
        report.dashboards.write(recovery.panel(), resumed.start, state.consumed_train_samples)
    if snapshots is not None:
        snapshots.begin(training, resumed)
    saver = None
    if locked is not None:
        saver = Saver(config, training, log, locked, facts=report.facts, resumed=resumed)
    loop = Loop(
        training,
        state,
        sources,
        report,
        saving=saver,
        snapshots=snapshots,
        export=prepare_export(config, training, resumed, state, log),
        observers=observers,
        start=resumed.start,
    )
    if is_live:
        setup.open_view(config.spec, report, terminal, placement)
    train(loop, report, config.checkpoint)


def train(loop: Loop, report: Report, checkpoint: CheckpointConfig) -> None:
    """Run the loop; log how to continue a run that ended early."""
    control = loop.training.control
    with setup.closing(report, control):
        is_complete = loop.run()
    if not is_complete:
        report.log.log0(setup.how_to_continue(checkpoint, loop.state.iteration))
    if control.device.type == "cuda":
        loop.training.close()  # gloo's groups end with the process


def command() -> NoReturn:
    """Run as a script or as the command `pretrain-llama`; end with an exit status."""
    run_script("pretrain_llama.py", main)


if __name__ == "__main__":
    command()
