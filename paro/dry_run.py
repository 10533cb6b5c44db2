"""Checks a launch without starting it: what one rank of it would hold, compute, send and read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from data.fingerprint import check_tokenizer
from data.gpt_dataset import check_vocabulary
from data.indexed_dataset import IndexedDataset, bin_path, idx_path
from model.config import flops_per_token, num_parameters
from paro.assembly import build_training
from paro.checkpoint.directory import find_checkpoint
from paro.config import RunConfig
from paro.config_checkpoint import resumed_samples
from paro.config_checks import check_overwriting
from paro.config_plan import case_of
from paro.config_record import model_line, recorded_arguments
from paro.placement import placement_lines, predict_memory
from paro.planning.cost_model import UnitSize, model_state_bytes, traffic_per_step
from paro.planning.description import describe, describe_launch
from paro.planning.llama import units_of
from paro.planning.planner import Estimator
from paro.planning.planner import plan as search
from paro.planning.remedies import why_nothing_fits
from paro.planning.settings import Case
from paro.planning.working_memory import Moment
from paro.quantities import count_text as _count
from paro.quantities import size_text as _size
from paro.report.log import Log
from paro.report.log_line import arguments_block
from paro.runtime import PlannedControl, World
from paro.sharding.shards import UnitShards
from paro.training import Training

USABLE = 0.9  # of a device: CUDA's context, communication buffers and fragmentation take the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run that is not started, and its first rank, which has sizes and no storage."""

    config: RunConfig
    world: World
    training: Training
    memory: Moment
    consumed: int = 0  # the training samples behind which a run goes on that loads

    @property
    def num_micro_batches(self) -> int:
        return self.config.batches.num_micro_batches_at(self.consumed)

    @property
    def units(self) -> tuple[UnitSize, ...]:
        """The units as the formulas know them, with what was built to be trained."""
        trained = {
            span.box.name
            for unit in self.training.model.trainable_units
            for span in unit.layout.spans
        }
        rotates = self.config.sharding.materialize == "rotate"
        return units_of(
            self.config.model,
            world_size=self.world.size,
            is_trained=trained.__contains__,
            rotated_over=self.config.strategy.params if rotates else 1,
            in_place=self.config.sharding.rotate_in_place,
        )


def plan_run(config: RunConfig, world: World) -> Plan:
    """Builds one rank on the meta device; `ValueError` for what cannot be built."""
    is_trained, batches = not config.train.skip_train, config.batches
    control = PlannedControl(world, torch.device("meta"))
    on_meta = build_training(config, control, is_trained=lambda _name: is_trained)
    device = "cpu" if config.runtime.distributed_backend == "gloo" else "cuda"
    training = replace(on_meta, device=torch.device(device))  # which kernels there will be
    return Plan(
        config=config,
        world=world,
        training=training,
        memory=predict_memory(config, training),
        consumed=resumed_samples(config.checkpoint) if batches.step_batch_size_schedule else 0,
    )


def run_dry(config: RunConfig, world: World) -> None:
    """Prints all that can be known before a start; `ValueError` where it would fail or not fit."""
    log = Log()
    log.log0(arguments_block(recorded_arguments(config)))
    for notice in config.notices:
        log.log0(notice)
    plan = plan_run(config, world)
    for section in SECTIONS:
        for line in section(plan):
            log.log0(line)
    check_fits(plan)
    log.log0("> the launch is sound; nothing was started and nothing written")


def check_fits(plan: Plan) -> None:
    """`ValueError` unless the predicted memory fits the device that was named, if one was."""
    limit = plan.config.launch.device_memory_gb
    if limit is not None and plan.memory.total > USABLE * limit * 1e9:
        raise ValueError(
            f"a rank needs {plan.memory.total / 1e9:.1f} GB at {plan.memory.name}, of "
            f"--device-memory-gb {limit:g} about {USABLE * limit:.1f} can be used: lower "
            "--micro-batch-size, recompute more, or spread more by --paro-strategy"
        )


# What is printed, in this order #


def _world(plan: Plan) -> Iterator[str]:
    world, backend = plan.world, plan.config.runtime.distributed_backend
    ranks = _count(world.size, "rank")
    nodes = _count(world.size // world.ranks_per_node, "node")
    yield f"> dry run of {ranks} on {nodes} of {world.ranks_per_node}, {backend}"


def _batch(plan: Plan) -> Iterator[str]:
    batches, seq_length = plan.config.batches, plan.config.data.seq_length
    size = batches.batch_size_at(plan.consumed)
    yield (
        f"> global batch of {size} x {seq_length} = {size * seq_length:,} tokens: "
        f"{_count(plan.world.size, 'rank')} x {_count(plan.num_micro_batches, 'micro-batch')} x "
        f"{_count(batches.micro_batch_size, 'sample')}"
    )
    for begin, larger in batches.step_batch_size_schedule or ():
        if begin > plan.consumed:
            count = _count(larger // batches.samples_per_micro_batch, "micro-batch")
            yield f">   from {begin * seq_length:,} tokens on {larger} samples, {count}"
    if batches.rampup_batch_size is not None and size != batches.global_batch_size:
        largest = batches.global_batch_size
        count = _count(largest // batches.samples_per_micro_batch, "micro-batch")
        yield f">   and ramps up to {largest} samples, {count}"
    if (batches.eval_batch, batches.eval_micro_batch) != (size, batches.micro_batch_size):
        count = _count(batches.num_eval_micro_batches, "micro-batch")
        per_rank = _count(batches.eval_micro_batch, "sample")
        yield f">   in evaluations {batches.eval_batch} samples, {count} x {per_rank}"
    iterations = plan.config.train.train_iters
    tokens = batches.samples_after(iterations) * seq_length
    yield f"> {iterations:,} iterations, {tokens:,} tokens in all"


def _model(plan: Plan) -> Iterator[str]:
    model, seq_length = plan.config.model, plan.config.data.seq_length
    yield model_line(plan.config)
    full = flops_per_token(model, seq_length, causal=False)
    causal = flops_per_token(model, seq_length, causal=True)
    tokens = plan.config.batches.batch_size_at(plan.consumed) * seq_length
    yield (
        f"> FLOPs: {full:.4e} a token with attention counted in full, {causal:.4e} with it halved; "
        f"{full * tokens / plan.world.size:.4e} a rank and step"
    )


def _placement(plan: Plan) -> Iterator[str]:
    yield from placement_lines(plan.config, plan.training)
    states = model_state_bytes(plan.config.strategy, plan.units, plan.config.precision)
    held = plan.training.optimizer.model_state_bytes()
    assert held == states.total, f"rank 0 holds {held} bytes, the formula says {states.total}"
    yield f"> precision: {plan.config.precision.describe()}"


def _units(plan: Plan) -> Iterator[str]:
    """The units of the first rank as they were built, those alike in one line."""
    units = plan.training.model.units
    yield f"> rank 0 on the meta device, {len(units)} units: elements of each state that it holds"
    alike: dict[tuple[int, ...], list[str]] = {}
    for unit in units:
        alike.setdefault(_held_by(unit), []).append(unit.name)
    rows: list[tuple[str, ...]] = [("unit", "whole", "params", "grads", "optimizer")]
    for sizes, names in alike.items():
        name = ", ".join(names) if len(names) < 3 else f"{names[0]} .. {names[-1]}"
        rows.append((name, *(f"{size:,}" for size in sizes)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        right = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        yield "  ".join((name.ljust(widths[0]), *right))


def _held_by(unit: UnitShards) -> tuple[int, int, int, int]:
    """Elements of a unit, and of each of its states on this rank."""
    return (
        unit.layout.numel,
        unit.param_shard.numel(),
        unit.grad_shard.numel(),
        unit.optim_grad.numel() if unit.trainable else 0,
    )


def _memory(plan: Plan) -> Iterator[str]:
    memory = plan.memory
    yield f"> memory of a rank: {_size(memory.total)} at most, at {memory.name}"
    for name, num_bytes in memory.parts().items():
        yield f"    {name:<16}  {_size(num_bytes, like=memory.total):>9}"
    limit = plan.config.launch.device_memory_gb
    if limit is not None and memory.total <= USABLE * limit * 1e9:
        yield f"> fits into the {USABLE * limit:.1f} GB that can be used of {limit:g} GB"


def _traffic(plan: Plan) -> Iterator[str]:
    config, context = plan.config, plan.training.model.units[0].context
    sent = traffic_per_step(
        config.strategy,
        context.topology,
        plan.units,
        config.precision,
        plan.num_micro_batches,
    )
    yield (
        f"> sent by a rank in a step: {_size(sent.intra)} inside its group, "
        f"{_size(sent.inter)} between groups"
    )
    if config.sharding.collective in ("flat", "ring"):
        yield f">   axis by axis; {config.sharding.collective} sends more of it between groups"


def _data(plan: Plan) -> Iterator[str]:
    """Corpora that lie on this machine, opened and checked; the others by name."""
    config = plan.config
    if config.data.mock_data:
        yield "> data: synthetic tokens"
    blends = config.data.blends().values()
    for prefix in dict.fromkeys(prefix for blend in blends for prefix in blend.prefixes):
        if not (idx_path(prefix).exists() or bin_path(prefix).exists()):
            yield f"> data: {prefix} is not on this machine and was not checked"
            continue
        corpus = IndexedDataset(prefix)
        check_tokenizer(prefix, config.tokenizer)
        check_vocabulary(corpus, config.vocab_size)
        yield (
            f"> data: {prefix} holds {corpus.num_tokens:,} tokens in {corpus.num_documents:,} "
            "documents"
        )


def _checkpoints(plan: Plan) -> Iterator[str]:
    checkpoint = plan.config.checkpoint
    if checkpoint.load is not None:
        found = find_checkpoint(checkpoint.load, checkpoint.ckpt_step)
        what = "no checkpoint on this machine" if found is None else f"holds {found.name}"
        yield f"> --load {checkpoint.load}: {what}"
    if checkpoint.save is not None:
        every = checkpoint.save_interval
        when = "at the end" if every is None else f"every {every} iterations"
        size = _size(12 * num_parameters(plan.config.model))  # fp32 parameters and two moments
        yield f"> --save {checkpoint.save}: {size} a checkpoint, {when}"
        check_overwriting(checkpoint, plan.config.train)


def _planner(plan: Plan) -> Iterator[str]:
    """How long a step takes on the machine of --paro-machine, and what would be faster there.

    `ValueError` in the end where the launch does not fit its devices.
    """
    config = plan.config
    machine = config.sharding.machine
    if machine is None:
        yield "> plan: --paro-machine NAME would say how long a step takes, and what is faster"
    elif machine.device is None:
        yield f"> plan: machine {machine.name} names no device, without which no step can be timed"
    elif config.train.skip_train:
        yield "> plan: steps that train nothing are not timed"
    else:
        yield from _plan_of(_case(plan), plan)


def _plan_of(case: Case, plan: Plan) -> Iterator[str]:
    launch = Estimator(case).estimate(case.setting(plan.config.strategy))
    yield f"> plan: on machine {case.machine.name} {describe_launch(launch)}"
    found = search(case)
    for line in describe(found):
        yield f"> {line}"
    if found.best is None:
        raise ValueError(why_nothing_fits(case, found))
    if not launch.fits:
        raise ValueError(
            f"a rank needs {launch.memory_bytes / 1e9:.1f} GB at {launch.memory.name}, a device of "
            f"{_whose_memory(case)} has {case.limit_bytes / 1e9:.1f} GB: the fastest "
            f"that fits is {found.best.setting.describe()}"
        )


def _whose_memory(case: Case) -> str:
    name = f"--paro-machine {case.machine.name}"
    return name if case.memory_bytes is None else f"{name} by --device-memory-gb"


def _case(plan: Plan) -> Case:
    config = plan.config
    return case_of(
        config.model,
        config.batches,
        config.sharding,
        config.precision,
        seq_length=config.data.seq_length,
        device_type=plan.training.device.type,
        memory_gb=config.launch.device_memory_gb,
    )


SECTIONS: tuple[Callable[[Plan], Iterable[str]], ...] = (
    _world,
    _batch,
    _model,
    _placement,
    _units,
    _memory,
    _traffic,
    _data,
    _checkpoints,
    _planner,
)
