"""Predicts a rank's memory and the time of a step, and compares memory with the device's."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import torch

from model.units import parameter_shapes
from paro.checkpoint.config import CheckpointConfig
from paro.config.run import RunConfig
from paro.errors import UserError, count_text
from paro.layout import Shape
from paro.planning.description import seconds_text
from paro.planning.remedies import larger_contexts, more_ranks
from paro.planning.run_memory import DeviceMemory
from paro.planning.search_space import least_recomputation, recompute_flags
from paro.precision import BYTES_OF
from paro.report.memory import available_host_bytes
from paro.report.record import PlannedStep
from paro.spec.offload import offloaded
from paro.spec.run_spec import RunSpec
from paro.spec.states import MASTER, adamw_states, averages, bytes_of, is_for_muon, muon_states
from paro.text import size_text
from paro.topology import PLANNED_WAITS, WaitKind


def check_memory(config: RunConfig, device: torch.device) -> str | None:
    """Raise `UserError` if the run cannot fit; all ranks must call it before any rank allocates.

    The ranks of a host share the host's memory. The error is raised if the tensors alone exceed the
    memory. If tensors fit but estimates of context and fragmentation do not, return a warning.
    """
    run, memory, ranks = config.spec, config.memory, max(1, config.world.ranks_per_node)
    of_copy, warning, checkpoint = 0, None, config.checkpoint
    if config.save_folder is not None and checkpoint.async_save:
        # Lower bound of the host copy of an async save: the bytes per rank if all share a folder.
        has_base = checkpoint.load is not None and not checkpoint.save_frozen
        size = checkpoint_bytes(run, has_base=has_base, has_moments=not checkpoint.no_save_optim)
        of_copy = size // run.world_size
    on_host = of_copy + memory.allocated
    if device.type == "cuda":
        warning = _check_device(config, device)
        of_states = offloaded(config.memories.specs(run)).host_bytes
        used = {"--async-save": of_copy, "--optimizer-cpu-offload": of_states}
        advice = f"leave {' or '.join(flag for flag in used if used[flag])} out"
        on_host = sum(used.values())
    available = available_host_bytes()
    if on_host * ranks <= available:
        return warning
    if device.type == "cpu":
        advice = remedy_of(config, lambda other: (of_copy + other.allocated) * ranks <= available)
    raise UserError(
        f"{count_text(ranks, 'rank')} of this host {'needs' if ranks == 1 else 'need'} "
        f"{size_text(on_host * ranks)} of its memory, and {size_text(available)} can be had: "
        f"{advice}"
    )


def _check_device(config: RunConfig, device: torch.device) -> str | None:
    memory, (free, total) = config.memory, torch.cuda.mem_get_info(device)
    left = f"{device} has {size_text(free)} free of {size_text(total)}"
    more = memory.total - memory.context  # this process has already created its CUDA context
    if more <= free:
        return None
    advice = remedy_of(config, lambda other: other.total - other.context <= free)
    if memory.allocated > free:
        raise UserError(
            f"a rank needs {size_text(memory.allocated)} of device memory at {memory.name}, and "
            f"{left}: {advice}"
        )
    return (
        f"WARNING: with communicators and fragmentation, which are estimates, a rank needs "
        f"{size_text(more)} of device memory at {memory.name}, and {left}. If it runs out: {advice}"
    )


def checkpoint_bytes(run: RunSpec, *, has_base: bool, has_moments: bool) -> int:
    """Count the bytes of a checkpoint: masters, moments and averages of what trains.

    Frozen parameters are saved in their own dtype, unless the base checkpoint has them.
    """
    precision, by_muon = run.precision, run.precision.optimizer == "muon"

    def of_trained(name: str, shape: Shape) -> int:
        has_momentum = by_muon and is_for_muon(name, shape)
        states = (muon_states if has_momentum else adamw_states)(precision)
        return bytes_of((*(states if has_moments else [MASTER]), *averages(precision)))

    of_frozen = 0 if has_base else BYTES_OF[precision.frozen]
    return sum(
        math.prod(shape) * (of_trained(name, shape) if name in run.trained else of_frozen)
        for name, shape in parameter_shapes(run.model).items()
    )


def upload_text(
    num_bytes: int, num_nodes: int, checkpoint: CheckpointConfig, step_seconds: float | None
) -> str:
    """Describe a save into an object store, by the share of a node: its disk, then the upload.

    `step_seconds` is None if it is not known.
    """
    share, every = num_bytes / num_nodes, checkpoint.save_interval
    text = f"a node writes {size_text(round(share))} on its disk and then uploads it"
    if every is None:
        return f"{text}: the end of the run waits for both"
    if not checkpoint.async_save:
        return f"{text}: training waits for both; --async-save trains meanwhile"
    if step_seconds is None:
        return f"{text} while training continues"
    interval_seconds = every * step_seconds
    return (
        f"{text} while training continues: both must end within {seconds_text(interval_seconds)}, "
        f"or the next save waits: {share / interval_seconds / 1e9:.2g} GB/s or more of a node"
    )


def remedy_of(config: RunConfig, fits: Callable[[DeviceMemory], bool]) -> str:
    """List changes by which the predicted memory fits; first the changes that surely suffice."""
    run, snapshot = config.spec, config.memory.allocations

    def of_run(other: RunSpec) -> bool:
        return fits(config.memories.of(other))

    enough = least_recomputation(run.model, lambda how: of_run(replace(run, recompute=how)))
    advice = [] if enough is None else [f"give {recompute_flags(enough)}"]
    if run.can_offload:
        precision = replace(run.precision, optimizer_cpu_offload=True)
        if of_run(replace(run, precision=precision)):
            advice.append("give --optimizer-cpu-offload")
    contexts = () if run.materialize.rotates else larger_contexts(run)
    fitting = (flags for flags, layout in contexts if of_run(replace(run, context=layout)))
    advice += [f"give {flags}" for flags in islice(fitting, 1)]
    if run.micro_batch_size > 1:
        advice.append("lower --micro-batch-size")
    is_spread = min(run.strategy.degrees) == run.world_size
    for ranks, flags in more_ranks(run, config.world.ranks_per_node, of_run) if is_spread else ():
        advice.append(f"start {ranks} ranks{flags and f' with {flags}'}")
    if snapshot.states * 2 > snapshot.total:
        spread_more = ["spread more by --paro-strategy", "start more ranks"]
        advice += [*spread_more * (not is_spread), "take a smaller model"]
    else:
        advice.append("lower --seq-length")
    return ", or ".join(advice)


def bytes_by_part(memory: DeviceMemory) -> dict[str, int]:
    """Map each part of memory, by its name on dashboards, to bytes; add the allocated total."""
    always = memory.allocations.parts()
    parts = {name: size for name, size in memory.parts().items() if name in always or size}
    named = {name.replace(" ", "-"): size for name, size in parts.items()}
    return {**named, "total": memory.allocated}


def planned_step(config: RunConfig) -> PlannedStep | None:
    """Predict the time of a step of the last global batch; None without a machine."""
    estimator = config.estimator
    if estimator is None or not config.trained:
        return None
    request = estimator.request
    timeline = estimator.estimate(request.candidate(config.strategy)).timeline
    seconds = defaultdict(float, step=timeline.seconds, computing=timeline.compute_seconds)
    for name, (_, kind) in PLANNED_WAITS.items():
        if kind is not WaitKind.CONTEXT or request.context.size > 1:
            seconds["computing" if kind is None else kind.value] += timeline.exposed[name]
    return PlannedStep(
        machine=request.machine.name,
        global_batch_size=request.global_batch_size,
        seconds=dict(seconds),
    )
