"""Sets up what a run trains with, and logs it: kernels, model, optimizer, states, data."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from data.gpt_dataset import check_answers, check_rows
from data.loader import Datasets
from model.block_attention import check_attention
from model.compilation import check_compiler
from model.fusion import usable_kernels
from model.matmul import check_matmul_types
from paro.config.record import model_line, trained_lines
from paro.config.run import RunConfig
from paro.distributed.control import Control
from paro.distributed.rendezvous import by_value
from paro.errors import UserError
from paro.launch.placement import check_placement, placement_lines
from paro.launch.prediction import check_memory
from paro.optim.adamw import choose_adamw
from paro.optim.muon import choose_muon_kernels
from paro.quantization.blocks import choose_kernels
from paro.report.log import Log
from paro.sharding.buffers import TORCH_TYPES
from paro.training.assembly import build_data, build_training, initializer_of
from paro.training.in_memory import InMemoryCheckpointer
from paro.training.resume import FROM_NOTHING, Resumed, load_run, tell_order
from paro.training.step import Training, TrainState

# Which flags choose torch's operations, where a kernel works on some ranks only. Codes have the
# same bits by either, and attention's kernels the same memory.
_WITHOUT: dict[str, Callable[[RunConfig], RunConfig]] = {
    "blocks": lambda config: replace(config, fusions=None),
    "update": lambda config: replace(
        config, optim=replace(config.optim, adam_implementation="torch")
    ),
}


def build(config: RunConfig, control: Control, log: Log) -> tuple[Training, list[str]]:
    """Build model and optimizer and logs them; also returns the lines of the placement table."""
    with control.raise_on_all_ranks(name_rank=True):
        warning = check_memory(config, control.device)
    if warning is not None:
        log.log0(warning)
    with_kernels, lines = agree_on_kernels(config, control)
    for line in lines:
        log.log0(line)
    random.seed(config.train.seed)  # for libraries: model and data have generators of their own
    torch.manual_seed(config.train.seed)
    training = build_training(with_kernels, control, initialized=False)
    placement = placement_lines(config, training)
    model = model_line(config.model, config.data.seq_length, config.vocab_size)
    trained = trained_lines(config.model, config.trainable)
    for line in (*config.notices, model, *trained, *placement):
        log.log0(line)
    check_placement(config, training)
    return training, placement


def fill(
    config: RunConfig, training: Training, snapshots: InMemoryCheckpointer | None, log: Log
) -> Resumed:
    """Fill the run from in-memory checkpoints, else from --load, else with initial values.

    No initial value is drawn for what is filled.
    """
    recovered = snapshots.recover(training) if snapshots is not None else None
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


def open_data(config: RunConfig, state: TrainState, resumed: Resumed, log: Log) -> Datasets:
    """Return the data sets of the run; logs it if their order changed since the checkpoint.

    `UserError` where --skip-train leaves nothing to evaluate, or where nothing can be learnt.
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
    held_out = datasets.valid or datasets.named_valid or datasets.test
    if config.train.skip_train and not held_out:
        split = config.data.split_in_use
        flags = f"--split {split}" if split else "--valid-data-path and --test-data-path"
        raise UserError(
            f"--skip-train has nothing to evaluate: {flags} leaves no sample for validation or test"
        )
    if resumed.state is not None and resumed.recovery is None and not config.train.skip_train:
        tell_order(config, resumed.state, datasets, log)
    return datasets


# Replicas of an optimizer shard stay equal only if the same kernel updates them.


def agree_on_kernels(config: RunConfig, control: Control) -> tuple[RunConfig, list[str]]:
    """Return the configuration with kernels that work on all ranks, and what was chosen, in lines.

    Collective. `UserError` on all ranks where one that the flags name does not work on some rank.
    """
    with control.raise_on_all_ranks(name_rank=True):
        mine = dict(_tried(config, control))
    everyone = control.gather(mine)
    lines = []
    for what, line in mine.items():
        found = {rank: choices[what] for rank, choices in enumerate(everyone)}
        if len(set(found.values())) > 1:
            line = f"WARNING: ranks differ: {by_value(found)}"
            if what in _WITHOUT:
                config = _WITHOUT[what](config)
                line += ": all use torch's operations"
        if line:
            lines.append(f"> {line}")
    return config, lines


def _tried(config: RunConfig, control: Control) -> Iterator[tuple[str, str]]:
    """What this rank would use for each purpose; empty where there is no choice."""
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
        yield "codes", choose_kernels(device).line or ""
