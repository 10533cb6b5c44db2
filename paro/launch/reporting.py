"""Opens the report of a run, observes it, and says at the end how it is continued."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from data.waits import Wait
from model.config import LlamaConfig
from model.units import num_parameters
from paro.arguments.parser import take
from paro.checkpoint.config import CheckpointConfig
from paro.checkpoint.locked_folders import LockedFolders
from paro.config.record import precision_line, recorded_arguments
from paro.config.run import RunConfig
from paro.distributed.control import Control
from paro.distributed.process_group import RuntimeConfig
from paro.distributed.world import World, world_or_alone
from paro.errors import RunError, UserError
from paro.launch.prediction import bytes_by_part, planned_step, predict_memory
from paro.report.config import ReportConfig
from paro.report.log import Log
from paro.report.memory import MemoryForecast
from paro.report.profiler import MemoryHistory, Profiler
from paro.report.record import RunFacts
from paro.report.report import Report, open_report
from paro.report.watchdog import Observer, WatchConfig, Watchdog
from paro.strategy import Strategy
from paro.training.assembly import run_facts
from paro.training.step import Training, TrainState


@contextmanager
def early_watchdog() -> Iterator[None]:
    """Watch the block with the default limits: the file of --yaml-cfg may not answer."""
    minutes = RuntimeConfig().distributed_timeout_minutes
    rank = world_or_alone().rank
    with Watchdog(WatchConfig(), rank=rank, timeout_minutes=minutes) as watchdog:
        watchdog.begins("reading the flags", 0)
        yield


def watchdog_of(args: Namespace, world: World) -> Watchdog:
    """Return the watchdog of this process, from before anything that may hang; sets the limit of
    waits."""
    watch, runtime = take(WatchConfig, args), take(RuntimeConfig, args)
    Wait.limit_seconds = runtime.timeout.total_seconds()
    return Watchdog(
        watch,
        rank=world.rank,
        timeout_minutes=runtime.distributed_timeout_minutes,
        flight_dir=runtime.flight_recorder_dir,
    )


def report_config(config: RunConfig) -> ReportConfig:
    """What is reported, and where; a run that only evaluates leaves no records."""
    return config.report.without_records() if config.train.skip_train else config.report


def start_report(
    config: RunConfig,
    training: Training,
    state: TrainState,
    locked: LockedFolders | None,
    log: Log,
    bytes_before: int,
) -> tuple[Report, RunFacts]:
    """Open the report and logs what its numbers depend on; collective."""
    memory = predict_memory(config, training.device.type)
    planned = planned_step(config, training.device.type)
    facts = run_facts(config, training, bytes_by_part(memory), planned, state=state)
    with training.control.raise_on_all_ranks():
        report = open_report(
            report_config(config),
            facts,
            log,
            device=training.device,
            start_iteration=state.iteration,
            arguments=recorded_arguments(config),
            is_ours=(lambda: True) if locked is None else locked.is_ours,
        )
    report.forecast = MemoryForecast(
        predicted_bytes=memory.allocated,
        reserved_bytes=memory.reserved,
        states_bytes=memory.allocations.states,
        bytes_before=bytes_before,
    )
    precision = precision_line(config.model, config.precision)
    report.start({"precision": precision, "memory": memory.describe()})
    return report, facts


def profilers_of(config: RunConfig, log: Log, training: Training) -> tuple[Observer, ...]:
    """What observes the loop in addition to the report and the watchdog."""
    folder = config.report.tensorboard_dir or config.checkpoint.save
    return (
        Profiler(config.profile, log, folder=folder),
        MemoryHistory(config.profile, log, training.device),
    )


def title_of(model: LlamaConfig, strategy: Strategy) -> str:
    """Return the title of the terminal view: model size and strategy."""
    return f"LLaMA, {num_parameters(model) / 1e6:,.1f}M parameters, {strategy.name}"


@contextmanager
def closing(report: Report, control: Control) -> Iterator[None]:
    """Close the report at the end, also after an error of all ranks: dashboards record it."""
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
        report.close_view()
        raise
    report.close()


def how_to_continue(checkpoint: CheckpointConfig, iteration: int) -> str:
    """Return the last log line of a run that ended early: where it is saved, how to continue."""
    if checkpoint.save is None:
        return f"iteration {iteration} is not saved: there was no --save"
    saved = f"iteration {iteration} is saved in {checkpoint.save}"
    if checkpoint.continues:
        return f"{saved}: the same command continues from there"
    without = [flag for flag in ("finetune", "start_over") if getattr(checkpoint, flag)]
    words = "".join(f" and leave --{flag.replace('_', '-')} out" for flag in without)
    return f"{saved}: to continue give --load {checkpoint.save}{words}"
