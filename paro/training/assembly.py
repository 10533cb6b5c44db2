"""Builds model, optimizer, communication and data of a run from its configuration."""

from __future__ import annotations

import os
from collections.abc import Container, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch

from data.batch import BatchFetcher
from data.blend import starts_of
from data.config import DataConfig
from data.loader import Datasets, MicroBatches, Samples, SplitCounts, build_datasets
from model.attention import Core
from model.config import LlamaConfig
from model.fusion import usable_kernels
from model.initialization import initial_values, parameter_initializers
from model.llama import Llama
from model.units import flops_per_token, unit_specs
from paro.collectives.api import make_collectives
from paro.collectives.choice import AlgorithmChoice
from paro.collectives.shifts import Ring
from paro.config.train import TrainConfig
from paro.context_parallel.attention import check_core, make_context_attention
from paro.distributed.control import Control
from paro.distributed.groups import Groups, group_among, make_groups, make_resources
from paro.distributed.timers import Timers, synchronize
from paro.distributed.world import World
from paro.machine.collective_time import choice_of
from paro.optim.optimizer import ParoOptimizer
from paro.report.flops import find_peak
from paro.report.record import RunFacts
from paro.rotation.rotated_model import RotatedModel, make_rotated_units
from paro.schedule.batch_schedule import BatchSchedule
from paro.sharding.buffers import TORCH_TYPES
from paro.sharding.distributed_model import DistributedModel, ShardedModel
from paro.sharding.sharded_unit import make_sharded_units
from paro.sharding.shards import Initializer, ShardingContext
from paro.spec.run_spec import RunSpec, groups_of
from paro.spec.sharding_spec import ShardingSpec
from paro.spec.units import registered_param_buffers, shape_of_run, units_of_run
from paro.step.actions import ActionKind
from paro.step.gathering import GatheringPolicy
from paro.step.schedule import policy_of
from paro.topology import StreamKind
from paro.training.loop import BatchSources, HeldOutData
from paro.training.step import Training, TrainState, last_iteration

if TYPE_CHECKING:
    from paro.config.run import RunConfig

_MAX_INIT_THREADS = 16


def build_training(config: RunConfig, control: Control, *, initialized: bool = True) -> Training:
    """Build model, optimizer and schedules, with initial values if `initialized`; no data yet.

    On the meta device there are shapes only: no storage and no process groups.
    """
    run, device = config.spec, control.device
    units = units_of_run(run)
    specs = run.specs(units)
    resources = make_resources(device, config.runtime.distributed_backend, overlap=run.overlaps)
    # Ranks with different machine files would choose differently and deadlock: `settings_of`.
    choice = choice_of(run.collective, config.sharding.machine, by_nccl=config.runtime.by_nccl)
    spans, rank = groups_of(run, specs, choice), control.world.rank
    settings = of_context = None
    if device.type != "meta":
        settings = config.runtime
        # Copy engines are for parameters only.
        of_context = replace(settings, paro_nccl_copy_engine=False)
    make = partial(make_groups, device=device, communicators=spans.number)
    groups = make(run.topology, rank, spans.states, settings, resources)
    context_groups = make(run.context_topology, rank, spans.context, of_context, resources)
    compute_dtype = TORCH_TYPES[run.precision.compute]
    llama_config = usable_kernels(run.model, config.fusions, compute_dtype, device).config
    with torch.device("meta"):
        model = Llama(llama_config)
    model.freeze(config.trained.__contains__, activations=compute_dtype)
    timers = Timers(config.report.timing_log_level, synchronize=partial(synchronize, device))
    context = ShardingContext(run.strategy, make_collectives(choice, groups), device)
    sharded = _spread(model, run, specs, context, timers)
    groups.registered.reserve(registered_param_buffers(run, units), control)
    if run.context.size > 1:
        model.core = _context_attention(run, control, context_groups, choice)
    optimizer = ParoOptimizer(sharded, run, config.optim, config.train.seed, config.param_groups)
    if initialized and device.type != "meta":
        optimizer.initialize(initializer_of(config.model, config.train.seed, control.world))
    return Training(
        config=config.train,
        batches=config.batches,
        schedule=config.schedule,
        loss_scale=config.loss_scale,
        model=sharded,
        optimizer=optimizer,
        control=control,
        traffic=resources.traffic,
        device=device,
        checks=config.checks,
        timers=timers,
        context_groups=context_groups,
        group_control=_group_control(run, control, config.runtime.timeout),
    )


def _group_control(run: RunSpec, control: Control, timeout: timedelta) -> Control:
    """Make small collectives among ranks that train alone; collective over the world."""
    world, size = control.world, control.world.group_size
    if run.outer is None or control.device.type == "meta" or size == world.size:
        return control
    groups = [tuple(range(begin, begin + size)) for begin in range(0, world.size, size)]
    ranks = groups[world.rank // size]
    return control.over(group_among(groups, world.rank, timeout), ranks)


def _spread(
    model: Llama,
    run: RunSpec,
    specs: Sequence[ShardingSpec],
    context: ShardingContext,
    timers: Timers,
) -> DistributedModel:
    """Shard the model's states over the ranks; parameters are gathered or rotated in a step."""
    units = [*{spec.buffer.unit_index: spec.unit for spec in specs}.values()]
    policy = policy_of(shape_of_run(run, units), run.updated_ahead)
    if isinstance(policy, GatheringPolicy):
        return ShardedModel(model, make_sharded_units(model, specs, context), policy, timers)
    (span,) = {gather.span for spec in specs for gather in spec.collectives[ActionKind.GATHER]}
    ring = Ring(context.collectives.groups, StreamKind.ROTATE, span)
    rotated = make_rotated_units(model, specs, context, ring)
    return RotatedModel(model, rotated, policy, timers, unit_specs(model.config))


def _context_attention(
    run: RunSpec, control: Control, groups: Groups, choice: AlgorithmChoice
) -> Core:
    """Build attention for context parallelism and run it once as a check."""
    layout, backend = run.context, run.model.attention_backend
    attention = make_context_attention(layout, groups, choice, backend)
    if control.device.type != "meta":
        dtype = TORCH_TYPES[run.precision.compute]
        head = torch.empty(run.model.kv_channels, dtype=dtype, device=control.device)
        with groups.resources.traffic.paused(), control.raise_on_all_ranks():
            check_core(attention, layout, groups.rank, head, backend, apart=run.apart)
        groups.resources.exposed_timer.take()
    return attention


def initializer_of(model: LlamaConfig, seed: int, world: World) -> Initializer:
    """Return a function that draws initial values, with this rank's share of the node's threads."""
    specs = parameter_initializers(model)
    of_rank = len(os.sched_getaffinity(0)) // world.ranks_per_node
    num_threads = max(1, min(of_rank, _MAX_INIT_THREADS))

    def values_of(name: str, begin: int, end: int) -> torch.Tensor:
        return initial_values(specs[name], seed, begin, end, num_threads=num_threads)

    return values_of


def count_samples(
    data: DataConfig, train: TrainConfig, batches: BatchSchedule, state: TrainState | None = None
) -> SplitCounts:
    """Count the samples of each split that the run draws, as Megatron counts them.

    A run resumed from `state` with another global batch size may need more samples. Only with
    --train-samples the number of training samples, and so their order, stays the same.
    """
    last = last_iteration(train, batches, state)
    per_evaluation = train.eval_iters * batches.eval_batch
    # Evaluations every --eval-interval iterations, and one after training.
    num_evaluations = last // train.eval_interval + 1 if train.eval_interval else 1
    num_train = train.train_samples or batches.samples_after(train.train_iters)
    num_valid = num_evaluations * per_evaluation
    if state is not None and not train.skip_train:
        left = max(0, last - state.iteration)
        num_train = max(num_train, batches.samples_after(left, state.consumed_train_samples))
        passed = state.iteration // train.eval_interval if train.eval_interval else 0
        num_valid_left = max(1, num_evaluations - passed) * per_evaluation
        num_valid = max(num_valid, state.consumed_valid_samples + num_valid_left)
    return SplitCounts(
        train=num_train,
        consumed=0 if state is None else state.consumed_train_samples,
        valid=None if data.full_validation and train.eval_iters else num_valid,
        test=per_evaluation,
    )


def build_sources(
    config: RunConfig,
    datasets: Datasets,
    training: Training,
    state: TrainState,
    *,
    trained_on: Container[str] | None = None,
) -> BatchSources:
    """Build this rank's micro-batches of every split, from the samples that `state` has consumed.

    `trained_on`: fingerprints of the tokenizers that the loaded model was trained on, if known.
    """
    batches, rank, layout = config.batches, training.control.world.rank, config.context.layout
    ranges = layout.ranges(rank, config.data.seq_length) if layout.size > 1 else None
    fetch = partial(BatchFetcher, rules=config.data, eod=config.eod, ranges=ranges)

    def read(fetch: BatchFetcher, size: int, consumed: int) -> MicroBatches:
        return MicroBatches(
            fetch,
            micro_batch_size=size,
            data_parallel_rank=rank // layout.size,
            data_parallel_size=batches.data_parallel_size,
            consumed_samples=consumed,
            num_workers=config.data.num_workers,
            pin_memory=training.device.type == "cuda",
        )

    def hold_out(samples: Samples, consumed: int, *, whole: bool, name: str = "") -> HeldOutData:
        size = batches.eval_micro_batch
        at_once = size * batches.data_parallel_size
        counts = datasets.token_bytes(samples, config.vocab_size, trained_on)
        scored = fetch(samples, whole=whole, token_bytes=counts)
        return HeldOutData(
            name=name or None,
            batches=read(scored, size, 0 if whole else consumed),
            num_micro_batches=-(-len(samples) // at_once) if whole else None,
        )

    consumed, whole = state.consumed_valid_samples, config.data.full_validation
    return BatchSources(
        train=read(fetch(datasets.train), batches.micro_batch_size, state.consumed_train_samples),
        valid=tuple(
            hold_out(samples, consumed, whole=whole, name=name)
            for name, samples in datasets.valid.items()
        ),
        test=() if datasets.test is None else (hold_out(datasets.test, 0, whole=False),),
    )


def build_data(config: RunConfig, state: TrainState | None = None) -> Datasets:
    """Open the data sets of a new run, or of a run resumed from `state`."""
    counts = count_samples(config.data, config.train, config.batches, state)
    return build_datasets(config.data, counts, config.vocab_size, config.tokenizer)


def run_facts(config: RunConfig, training: Training, state: TrainState | None = None) -> RunFacts:
    """Collect the constants of throughput of a run, maybe resumed from `state`; collective."""
    seq_length, trained = config.data.seq_length, config.trained
    phases = config.data.phases()
    return RunFacts(
        world_size=training.control.world.size,
        seq_length=seq_length,
        phases={phase.name: start for phase, start in zip(phases, starts_of(phases), strict=True)},
        train_iters=last_iteration(config.train, config.batches, state),
        flops_per_token=flops_per_token(config.model, seq_length, trained, causal=False),
        flops_per_token_causal=flops_per_token(config.model, seq_length, trained, causal=True),
        peak=find_peak(
            training.device,
            compute=config.precision.compute,
            peak_tflops=config.report.peak_tflops,
            control=training.control,
        ),
        model_state_bytes=training.optimizer.model_state_bytes(),
    )
