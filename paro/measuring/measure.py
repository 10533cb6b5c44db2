"""Measures the machine of a run with the run's own model and shapes, in about a minute."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from model.trainable import Trainable
from paro.collectives.schedule import COLLECTIVES, NCCL_COLLECTIVES
from paro.config.context_parallel import AUTO
from paro.config.run import RunConfig
from paro.config.sharding import ShardingConfig
from paro.distributed.control import Control
from paro.distributed.world import World
from paro.errors import UserError
from paro.machine.machine import Machine
from paro.measuring.benchmark import CollectiveBenchmark, time_links, with_measured
from paro.measuring.device import Effort, PartsOfStep, measure_device, parts_of_step, with_layers
from paro.measuring.memory import memory_of_rank, with_communicators
from paro.planning.run_memory import RunMemory
from paro.precision import BYTES_OF
from paro.quantization.formats import FULL_BITS
from paro.schedule.batch_schedule import BatchSchedule
from paro.schedule.step_checks import StepChecksConfig
from paro.spec.run_spec import RunSpec
from paro.spec.units import units_of
from paro.strategy import parse_strategy
from paro.text import size_text
from paro.topology import AxisSpan, make_topology

SECONDS = 60.0  # the most seconds of a measurement
_LINKS = 25.0  # the most seconds for links
_LEAST_FOR_LINKS = 20.0  # the least seconds for links: small sizes alone say little of large ones
_MICRO_BATCH = 1.0  # the most seconds of a micro-batch; shorter ones than the run's compute slower
_GROWTH = 4  # factor of the tokens of the next attempt; attention makes the time grow by more
_STEP = 1.0  # the most seconds of a step of all timed layers; the device has 30 s of the 60 s
_MOST_STEP = 4.0  # the most seconds of a step of one layer
_LEAST_LENGTH = 64
_MULTIPLE = 16  # a cut sequence length is a multiple of this, for matmuls in fp8
_MOST_LAYERS = 4
_MOST_MEMORY = 0.6  # the largest share of the device's memory for model states
_EFFORT = Effort(warmup=2, steps=3, micro_batches=2, seconds=1.5)
_LEAST_EFFORT = Effort(warmup=1, steps=1, micro_batches=1)  # if one layer takes more than _STEP


def measure_machine(
    config: RunConfig, control: Control, *, name: str, source: str, say: Callable[[str], None]
) -> Machine:
    """Measure the machine, equal on all ranks; collective. `say` is called before each part.

    `UserError` if not even one block fits a rank.
    """
    begin = time.monotonic()
    run, world, runtime = config.spec, config.world, config.runtime
    say("what a rank computes")
    lone = one_rank(config)
    fitting = layers_that_fit(lone.spec, min(control.gather(memory_of_rank(control))))
    timed, effort = affordable(lone, fitting, lambda cut: parts_of_step(cut, control))
    ranks = run.group_size if run.materialize.rotates else 1  # over which slices would rotate
    device = measure_device(
        timed, control, group_size=ranks, sequence=run.seq_length, effort=effort
    )
    device = with_communicators(device, control, world.topology(), runtime)
    left = min(_LINKS, SECONDS - 10.0 - (time.monotonic() - begin))
    benchmark = CollectiveBenchmark(
        control=control,
        topology=world.topology(),
        runtime=runtime,
        algorithms=algorithms_of(run),
        rounds=3,  # the median of 3 is right even if one run is disturbed
        while_computing=control.device.type == "cpu",
    )
    seconds = control.gather(max(left, _LEAST_FOR_LINKS))[0]
    units = units_of(run.model, world_size=world.size, is_trained=run.trained.__contains__)
    largest = max(unit.numel for unit in units) * BYTES_OF["fp32"]
    results = time_links(benchmark, spans_of(run), most_bytes=largest, seconds=seconds, say=say)
    machine = Machine(name=name, source="", world_size=world.size, group_size=world.group_size)
    machine = with_measured(machine, results, device, source=source)
    of_first_rank: Machine = control.gather(machine)[0]
    return of_first_rank


def algorithms_of(run: RunSpec) -> tuple[str, ...]:
    """Return the algorithms that the planner may have to time for a run."""
    if run.collective != AUTO:
        return tuple(dict.fromkeys(("native", run.collective)))  # others have native parts
    return NCCL_COLLECTIVES if run.device_type == "cuda" else COLLECTIVES


def spans_of(run: RunSpec) -> list[AxisSpan]:
    """Return the axis spans along which collectives of a run are timed."""
    topology = make_topology(world_size=run.world_size, group_size=run.group_size, degrees=())
    axes = topology.axes
    spans: list[AxisSpan] = [(axis,) for axis in axes]
    if algorithms_of(run) != ("native",) and len(axes) > 1:
        spans.append(axes)  # only native runs axis by axis
    return spans


def affordable(
    config: RunConfig, most_layers: int, parts_of_step: Callable[[RunConfig], PartsOfStep]
) -> tuple[RunConfig, Effort]:
    """Choose micro-batches and an effort of timing that fit the seconds for the device.

    The first attempt has one layer and few tokens, since a large model may take minutes;
    `UserError` if even this attempt takes too long.
    """
    cut = shortened(with_layers(config, 1), 0.0)
    took = parts_of_step(cut)
    step = took.micro_batch + took.update
    if step > _MOST_STEP:
        raise UserError(
            f"a step of one block and {cut.data.seq_length} tokens takes {step:.0f} s on this "
            f"machine, too long to measure it in {SECONDS:.0f} s: give --paro-machine, a shipped "
            "name or a file"
        )
    layers = max(1, min(most_layers, int(_STEP / step)))
    effort = _EFFORT if step <= _STEP else _LEAST_EFFORT
    whole = config.spec.num_tokens
    share, seconds = cut.spec.num_tokens / whole, layers * took.micro_batch
    while share < 1 and seconds < _MICRO_BATCH / _GROWTH:
        cut = shortened(with_layers(config, layers), _GROWTH * share)
        share, seconds = cut.spec.num_tokens / whole, parts_of_step(cut).micro_batch
    return shortened(config, share * _MICRO_BATCH / seconds), replace(effort, num_layers=layers)


def one_rank(config: RunConfig) -> RunConfig:
    """Return the training of one rank, with the model, shapes and trained parameters of the run.

    It has no recomputation, which the planner counts, and no compilation.
    """
    batches, sharing = config.batches, config.context.context_parallel_size
    size = batches.micro_batch_size
    return replace(
        config,
        model=replace(config.model, recompute=None, torch_compile=None),
        trainable=Trainable(),
        batches=BatchSchedule(micro_batch_size=size, global_batch_size=size, data_parallel_size=1),
        sharding=ShardingConfig(world=World()),
        strategy=parse_strategy("NNN", world_size=1, group_size=1),
        precision=replace(config.precision.with_inter_bits(FULL_BITS), optimizer="adam"),
        train=replace(config.train, skip_train=False),
        checks=StepChecksConfig(),
        data=replace(config.data, seq_length=config.data.seq_length // sharing),
    )


def layers_that_fit(run: RunSpec, memory_bytes: int) -> int:
    """Count the layers that one rank can train alone, at most a few; `UserError` if none."""
    for layers in range(min(_MOST_LAYERS, run.model.num_layers), 0, -1):
        fewer = replace(run, model=replace(run.model, num_layers=layers))
        needed = RunMemory(None).states(fewer).total
        if needed <= _MOST_MEMORY * memory_bytes:
            return layers
    raise UserError(
        f"a rank has {size_text(memory_bytes)}, too little to time one block of this model on "
        f"each, whose states take {size_text(needed)}: give --paro-machine, a shipped name or a "
        "file"
    )


def shortened(config: RunConfig, scale: float) -> RunConfig:
    """Cut micro-batches to at most the share `scale` of their tokens; unchanged if it is >= 1."""
    if scale >= 1:
        return config
    size, length = config.batches.micro_batch_size, config.data.seq_length
    fewer = max(1, int(size * scale))
    if size * scale < 1:
        shorter = int(length * size * scale) // _MULTIPLE * _MULTIPLE
        length = min(length, max(_LEAST_LENGTH, shorter))
    batches = BatchSchedule(micro_batch_size=fewer, global_batch_size=fewer, data_parallel_size=1)
    return replace(config, batches=batches, data=replace(config.data, seq_length=length))
