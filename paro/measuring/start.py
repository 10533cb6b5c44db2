"""Finds or measures the machine of a run at its start, and plans by it, where a flag says auto."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch

from model.block_attention import gpu_of
from model.trainable import Trainable
from paro.collectives.schedule import COLLECTIVES, NCCL_COLLECTIVES, Op
from paro.config.context_parallel import AUTO
from paro.config.run import RunConfig
from paro.config.sharding import ShardingConfig
from paro.distributed.control import Control
from paro.distributed.rendezvous import first_difference
from paro.distributed.world import World, read_cache_folder
from paro.errors import UserError, describe
from paro.files.atomic_file import replace_file
from paro.files.object_store import is_url
from paro.machine.files import machine_to_json, read_machine
from paro.machine.machine import Machine
from paro.measuring.benchmark import CollectiveBenchmark, time_links, with_measured
from paro.measuring.device import Effort, PartsOfStep, measure_device, parts_of_step, with_layers
from paro.measuring.memory import memory_of_rank, with_communicators
from paro.planning.run_memory import RunMemory
from paro.precision import BYTES_OF
from paro.quantization.formats import FULL_BITS
from paro.report.log import Log
from paro.report.memory import give_back_freed_memory
from paro.report.watchdog import Watchdog
from paro.schedule.batch_schedule import BatchSchedule
from paro.schedule.step_checks import StepChecksConfig
from paro.spec.run_spec import RunSpec
from paro.spec.units import units_of
from paro.strategy import parse_strategy
from paro.text import listed, ranks_text, size_text
from paro.topology import AxisSpan, axes_of, make_topology
from paro.training.exit_signal import ExitSignal

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


class ExitRequestedError(Exception):
    """Error on all ranks: a signal has asked one of the ranks to end the run."""


@dataclass(eq=False, kw_only=True)
class InterruptibleControl(Control):
    """Control whose gathers raise `ExitRequestedError` on all ranks once one rank has a signal."""

    exit_signal: ExitSignal

    def gather(self, value: object) -> list[Any]:
        by_rank = super().gather((value, self.exit_signal.name))
        if names := [name for _, name in by_rank if name is not None]:
            raise ExitRequestedError(f"receiving {names[0]}")
        return [value for value, _ in by_rank]


def plan_on_this_machine(
    config: RunConfig, control: Control, watchdog: Watchdog
) -> RunConfig | None:
    """Replace values of auto in `config` by those of a plan for this machine; collective.

    Returns `config` itself if nothing is to be measured, None if a signal asks to exit meanwhile.
    `UserError` on all ranks if nothing fits, or if ranks would choose differently.
    """
    if config.open is None:
        return config
    exit_signal = ExitSignal()
    try:
        with exit_signal.caught(config.train):
            gathering = InterruptibleControl(**vars(control), exit_signal=exit_signal)
            machine = find_measured(config, gathering, watchdog)
    except ExitRequestedError as reason:
        log = Log(rank=control.world.rank, world_size=control.world.size)
        where = "while its machine was measured, before it trained"
        log.log0(f"[exiting program after {reason} {where}] datetime: {datetime.now()}")
        return None
    watchdog.begins("planning", 0)
    with control.raise_on_all_ranks():
        config = config.on_measured(machine)
    bits = config.precision.inter_param_bits, config.precision.inter_grad_bits
    chosen = {"--paro-strategy": config.strategy.name, "--paro-inter-bits": str(bits)}
    by_rank = dict(enumerate(control.gather(chosen)))
    if any(choice != chosen for choice in by_rank.values()):
        raise UserError(f"{first_difference(by_rank)}, by the same plan: give the flag a value")
    return config


def find_measured(config: RunConfig, control: Control, watchdog: Watchdog) -> Machine:
    """Return the machine from an earlier start's file, or measure it now; collective."""
    log = Log(rank=control.world.rank, world_size=control.world.size)
    depends_on = conditions(config, control)
    # Machine files are kept with the run's checkpoints, else with the user's caches.
    save = config.save_folder
    folder = read_cache_folder() if save is None or is_url(save) else save
    path = folder / f"{file_stem(depends_on)}.json"
    machine: Machine | None = None
    assert config.open is not None, "every choice is made"
    if control.world.rank == 0 and not config.open.sharding_flags.measures_anew:
        machine = earlier_machine(path, config.spec, depends_on, log.log0)
    machine = control.gather(machine)[0]
    if machine is not None:
        return machine

    def say(what: str) -> None:
        watchdog.begins(f"measuring {what}", 0)
        log.log0(f"> measuring this machine, about {SECONDS:.0f} s: {what}")

    begin = time.monotonic()
    source = f"measured at the start of a run: {listed([*map(str, depends_on.values())][:6])}"
    machine = measure_machine(config, control, name=path.stem, source=source, say=say)
    machine = replace(machine, conditions=depends_on)
    _forget(control.device)
    took = time.monotonic() - begin
    if control.world.rank == 0:
        written = f"machine file {path}, which --paro-machine takes"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, machine_to_json(machine))
        except OSError as error:
            written = f"the next start measures again, {path} cannot be written: {describe(error)}"
        log.log0(f"> measured in {took:.0f} s: {written}")
    return machine


def conditions(config: RunConfig, control: Control) -> dict[str, str]:
    """Return everything on which a measurement depends, equal on all ranks; collective."""
    device = control.device
    on_gpu = device.type == "cuda"
    kind = torch.cuda.get_device_name(device) if on_gpu else f"CPU, {platform.machine()}"
    share = f"{len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} threads"
    hosts = control.gather((platform.node(), kind, share))
    alone, world = one_rank(config), config.world
    return {
        "ranks": ranks_text(world.size, world.group_size),
        "hosts": f"hosts {', '.join(dict.fromkeys(host for host, *_ in hosts))}",
        "device": ", ".join(dict.fromkeys(kind for _, kind, _ in hosts)),
        "torch": f"torch {torch.__version__}",
        "backend": config.runtime.distributed_backend,
        "collectives": ", ".join(algorithms_of(config.spec)),
        "launch_order": config.runtime.paro_nccl_launch_order
        + ", copy engine" * config.runtime.paro_nccl_copy_engine,
        "places": str(hosts),
        "model": str(alone.model),
        "tokens": f"{alone.batches.micro_batch_size} x {alone.data.seq_length} of "
        f"{config.data.seq_length}",
        "types": f"{asdict(alone.precision)}, {alone.fusions}, {alone.optim.adam_implementation}",
        "materialize": config.sharding.materialize,
        "cudnn": str(gpu_of(device).cudnn) if on_gpu else "none",
    }


def file_stem(depends_on: dict[str, str]) -> str:
    """Return the name of the machine file for the conditions of a measurement."""
    return f"machine-{hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()[:12]}"


def earlier_machine(
    path: Path, run: RunSpec, depends_on: Mapping[str, str], say: Callable[[str], None]
) -> Machine | None:
    """Read the machine of an earlier start from `path` or its folder; None if there is none.

    The content of a file decides, not the name.
    """
    for file in (path, *sorted({*path.parent.glob("*.json")} - {path})):
        try:
            age = timedelta(seconds=max(0, round(time.time() - file.stat().st_mtime)))
            machine = read_machine(file)
        except FileNotFoundError:
            continue
        except (OSError, UserError) as error:
            reason: str | None = describe(error)
        else:
            reason = reason_invalid(run, depends_on, machine)
        if reason is None:
            say(f"> machine file {file}, {age} old, is of these ranks and flags: taken again")
            return machine
        if file == path:
            say(f"> {path} is measured again: {reason}")
    return None


def reason_invalid(run: RunSpec, depends_on: Mapping[str, str], machine: Machine) -> str | None:
    """Say why `machine` does not hold for this run; None if it holds."""
    if (machine.world_size, machine.group_size) != (run.world_size, run.group_size):
        return f"it is of {ranks_text(machine.world_size, machine.group_size)}"
    earlier = machine.conditions
    for name, now in depends_on.items():
        if earlier.get(name) != now:
            before = earlier.get(name, "not in the file")
            return f"its conditions.{name} is {before}, and here it is {now}"
    measured = {(row.axes, row.op, row.algorithm) for row in machine.measured}
    for span, op, name in product(spans_of(run), Op, algorithms_of(run)):
        if (axes_of(span), op, name) not in measured:
            return f"it has no {op.value} over {axes_of(span).value} axes by {name}"
    return "it has no device" if machine.device is None else None


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
    return control.gather(with_measured(machine, results, device, source=source))[0]


def algorithms_of(run: RunSpec) -> tuple[str, ...]:
    """Return the algorithms that the planner may have to time for a run."""
    if run.collective != AUTO:
        return tuple(dict.fromkeys(("native", run.collective)))  # others have native parts
    return NCCL_COLLECTIVES if run.device_type == "cuda" else COLLECTIVES


def spans_of(run: RunSpec) -> list[AxisSpan]:
    """Return the axis spans along which collectives of a run are timed."""
    axes = make_topology(world_size=run.world_size, group_size=run.group_size, degrees=()).axes
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

    It has no recomputation and no states in host memory, which the planner counts, and no
    compilation.
    """
    batches, context_size = config.batches, config.context.context_parallel_size
    size = batches.micro_batch_size
    return replace(
        config,
        model=replace(config.model, recompute=None, torch_compile=None),
        trainable=Trainable(),
        batches=BatchSchedule(micro_batch_size=size, global_batch_size=size, data_parallel_size=1),
        sharding=ShardingConfig(world=World()),
        strategy=parse_strategy("NNN", world_size=1, group_size=1),
        precision=replace(
            config.precision.with_inter_bits(FULL_BITS),
            optimizer="adam",
            optimizer_cpu_offload=False,
            optimizer_offload_fraction=1.0,
        ),
        train=replace(config.train, skip_train=False),
        checks=StepChecksConfig(),
        data=replace(config.data, seq_length=config.data.seq_length // context_size),
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


def _forget(device: torch.device) -> None:
    """Free the memory of the measurement, and reset the peak, which counts for the run alone."""
    give_back_freed_memory()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of resident memory
