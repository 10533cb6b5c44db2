"""Sets up and logs the parts of a run for pretrain_llama.py: kernels, training, data, report."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from data.gpt_dataset import check_answers, check_rows
from data.loader import Datasets
from model.block_attention import check_attention
from model.fusion import check_compiler, usable_kernels
from model.matmul import check_matmul_types
from model.units import num_parameters
from paro.checkpoint.agreement import LockedFolders
from paro.checkpoint.config import CheckpointConfig
from paro.config.record import model_lines, precision_line, recorded_arguments
from paro.config.run import EarlyConfig, RunConfig
from paro.distributed.control import Control
from paro.distributed.process_group import RuntimeConfig
from paro.distributed.rendezvous import by_value
from paro.distributed.world import world_or_alone
from paro.errors import RunError, UserError, flag_of
from paro.files.object_cache import ObjectCache
from paro.files.waits import LimitedWait
from paro.launch.placement import check_placement, placement_lines
from paro.launch.prediction import bytes_by_part, check_memory, planned_step
from paro.optim.adamw import choose_adamw
from paro.optim.muon import choose_muon_kernels
from paro.quantization.blocks import choose_kernels
from paro.report.log import Log, Terminal
from paro.report.memory import MemoryForecast
from paro.report.report import Report, open_report
from paro.report.watchdog import WatchConfig, Watchdog
from paro.sharding.buffers import TORCH_TYPES
from paro.spec.run_spec import RunSpec
from paro.training.assembly import build_data, build_training, initializer_of, run_facts
from paro.training.changed_flags import order_changes, order_record
from paro.training.in_memory import InMemoryCheckpointer
from paro.training.resume import FROM_NOTHING, Resumed, load_run
from paro.training.step import Training, TrainState


def build(config: RunConfig, control: Control, log: Log) -> tuple[Training, list[str]]:
    """Build and log model and optimizer; return them with the lines of the placement table."""
    with control.raise_on_all_ranks(name_rank=True):
        warning = check_memory(config, control.device)
    if warning is not None:
        log.log0(warning)
    agreed, lines = agree_on_kernels(config, control)
    log.log0(*lines)
    random.seed(config.train.seed)  # used by libraries; model and data have their own generators
    torch.manual_seed(config.train.seed)
    training = build_training(agreed, control, initialized=False)
    placement = placement_lines(config, training)
    log.log0(*config.notices, *model_lines(config), *placement)
    check_placement(training)
    return training, placement


def fill(
    config: RunConfig, training: Training, snapshots: InMemoryCheckpointer | None, log: Log
) -> Resumed:
    """Load the states from in-memory checkpoints, else from --load, else initialize them.

    Initial values are drawn only for parameters that were not loaded.
    """
    recovered = snapshots.recover(training) if snapshots is not None else None
    if recovered is not None:
        return recovered
    draw = initializer_of(config.model, config.train.seed, config.world)
    resumed = FROM_NOTHING
    if config.checkpoint.load is not None:
        if config.model.lora is not None:  # a checkpoint may lack adapters, so initialize them
            training.optimizer.initialize(draw, frozen=False)
        with training.control.raise_on_all_ranks():
            resumed = load_run(config, training, log)
    if resumed is FROM_NOTHING:
        training.optimizer.initialize(draw)
    return resumed


def open_data(
    config: RunConfig, state: TrainState, resumed: Resumed, log: Log
) -> tuple[Datasets, Resumed]:
    """Open the data sets of the run; log whether their order changed since the checkpoint.

    Also returns `resumed` with the record of that order, for the next checkpoints.
    `UserError` if --skip-train leaves nothing to evaluate, or no token of the data can be learnt.
    """
    datasets = build_data(config, state)
    corpora = datasets.corpora()
    if config.train.skip_train:
        del corpora["train"]
    check_answers(corpora)
    rows = resumed.frozen_rows(config.model, config.trained)
    if rows is not None and rows < config.vocab_size and not config.train.skip_train:
        check_rows(corpora, rows)
        log.log0(
            f"WARNING: the tokenizer has {config.vocab_size} ids, and the model of --load {rows} "
            "vocabulary rows, which are frozen: no other id was found in the data"
        )
    if config.train.skip_train and not (datasets.valid or datasets.test):
        split = config.data.split_in_use
        flags = f"--split {split}" if split else "--valid-data-path and --test-data-path"
        raise UserError(
            f"--skip-train has nothing to evaluate: {flags} leaves no sample for validation or test"
        )
    order = order_record(config.data, config.train, config.batches, datasets)
    if resumed.state is not None and resumed.recovery is None and not config.train.skip_train:
        log.log0(*order_changes(resumed.common, order))
    return datasets, resumed._replace(order=order)


# Kernels: replicas of an optimizer shard stay equal only if the same kernel updates all of them.


def agree_on_kernels(config: RunConfig, control: Control) -> tuple[RunConfig, list[str]]:
    """Leave out kernels that some rank lacks; also return log lines about kernels.

    Collective. `UserError` on all ranks if a kernel that flags request fails on any rank.
    """
    with control.raise_on_all_ranks(name_rank=True):
        mine = dict(_tried(config, control))
    everyone = control.gather(mine)
    agreed = config
    lines = []
    for what, line in mine.items():
        by_rank = {rank: choices[what] for rank, choices in enumerate(everyone)}
        if len(set(by_rank.values())) > 1:
            line = f"WARNING: ranks differ: {by_value(by_rank)}"
            # Quantization kernels may differ: all implementations give the same bits.
            if what == "blocks":
                agreed = replace(agreed, fusions=None)
            elif what == "update":
                agreed = replace(agreed, optim=replace(config.optim, adam_implementation="torch"))
            line += ": all use torch's operations" * (what in ("blocks", "update"))
        if line:
            lines.append(f"> {line}")
    return agreed, lines


def _tried(config: RunConfig, control: Control) -> Iterator[tuple[str, str]]:
    """Yield (purpose, kernel that this rank would use) wherever there is a choice of kernels."""
    device, dtype = control.device, TORCH_TYPES[config.precision.compute]
    check_matmul_types(config.model.fp8_format, dtype, device)
    check_compiler(config.model, device)
    apart = config.data.reset_attention_mask
    kernel = check_attention(config.model, dtype, device, documents=apart)
    yield "attention", f"attention: {kernel}"
    yield "blocks", usable_kernels(config.model, config.fusions, dtype, device).line or ""
    name, rounds = config.optim.adam_implementation, config.precision.rounds_moments
    chosen = choose_adamw(name, device, rounds=rounds)
    lines = [chosen.line]
    if config.precision.optimizer == "muon":
        lines.append(choose_muon_kernels(name, device).line)
    yield "update", "; ".join(filter(None, lines))
    if config.precision.quantizes:
        yield "codes", choose_kernels(device).line


@contextmanager
def early_watchdog() -> Iterator[None]:
    """Watch the block with the default limits, since reading --yaml-cfg may hang."""
    minutes = RuntimeConfig().distributed_timeout_minutes
    with Watchdog(WatchConfig(), rank=world_or_alone().rank, timeout_minutes=minutes) as watchdog:
        watchdog.begins("reading the flags", 0)
        yield


def watchdog_of(early: EarlyConfig) -> Watchdog:
    """Build the watchdog of this process; set the limit of waits, and a folder."""
    runtime = early.runtime
    LimitedWait.limit_seconds = runtime.timeout.total_seconds()
    if runtime.object_storage_cache_path is not None:
        ObjectCache.folder = Path(runtime.object_storage_cache_path)
    return Watchdog(
        early.watch,
        rank=early.world.rank,
        timeout_minutes=runtime.distributed_timeout_minutes,
        flight_dir=runtime.flight_recorder_dir,
    )


def start_report(
    config: RunConfig,
    training: Training,
    state: TrainState,
    start_iteration: int,
    locked: LockedFolders | None,
    log: Log,
    bytes_before: int,
) -> Report:
    """Open the report and log the facts that its numbers depend on; collective."""
    memory = config.memory
    predicted, planned = bytes_by_part(memory), planned_step(config)
    facts = replace(run_facts(config, training, state), predicted=predicted, planned=planned)
    with training.control.raise_on_all_ranks():
        report = open_report(
            config.report_in_use,
            facts,
            log,
            device=training.device,
            start_iteration=start_iteration,
            arguments=recorded_arguments(config),
            is_ours=locked.lock.is_ours if locked and locked.lock else lambda: True,
        )
    report.forecast = MemoryForecast(
        predicted_bytes=memory.allocated,
        reserved_bytes=memory.reserved,
        states_bytes=memory.allocations.states,
        bytes_before=bytes_before,
    )
    report.start({"precision": precision_line(config), "memory": memory.describe()})
    return report


def open_view(run: RunSpec, report: Report, terminal: Terminal, placement: Sequence[str]) -> None:
    """Replace the log lines by a live view, on the terminal of the rank that prints them."""
    if not report.log.is_last:
        return
    from paro.report.live_view import LiveConsole, LiveView  # the package rich may be missing

    assert report.forecast is not None, "the memory before the model is not known"
    millions = num_parameters(run.model) / 1e6
    report.view = terminal.view = LiveView(
        report.facts,
        title=f"LLaMA, {millions:,.1f}M parameters, {run.strategy.name}",
        placement=placement,
        bytes_before=report.forecast.bytes_before,
        console=LiveConsole(stderr=terminal.keeps_lines),
    )


@contextmanager
def closing(report: Report, control: Control) -> Iterator[None]:
    """Close the report after the block; dashboards record an error that all ranks raised."""
    try:
        yield
    except (UserError, RunError) as error:
        # If only this rank has the error, the other ranks never reach the barrier below.
        if not error.on_this_rank:
            with suppress(Exception):  # a failure of the report must not hide the error
                report.close()
                control.barrier()  # wait: launchers kill the other ranks when one rank exits
        raise
    except KeyboardInterrupt:
        report.interrupted()
        report.close_view()
        raise
    report.close()


def how_to_continue(checkpoint: CheckpointConfig, iteration: int) -> str:
    """Say where a run that ended early is saved, and how to continue it."""
    if checkpoint.save is None:
        return f"iteration {iteration} is not saved: there was no --save"
    saved = f"iteration {iteration} is saved in {checkpoint.save}"
    if checkpoint.continues:
        return f"{saved}: the same command continues from there"
    without = [flag for flag in ("finetune", "start_over") if getattr(checkpoint, flag)]
    words = "".join(f" and leave {flag_of(flag)} out" for flag in without)
    return f"{saved}: to continue give --load {checkpoint.save}{words}"
