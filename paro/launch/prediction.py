"""Predicts a rank's memory and the time of a step, and compares memory with what there is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from math import lcm

import torch

from model.config import RecomputeConfig
from model.units import parameter_shapes
from paro.config.plan import RankDevice, TrainingTask, plan_request_of
from paro.config.run import RunConfig
from paro.errors import UserError, count_text
from paro.layout import Shape
from paro.planning.estimator import Estimator
from paro.planning.remedies import fewest_ranks, larger_contexts
from paro.planning.run_memory import DeviceMemory, RunMemory
from paro.planning.search_space import (
    PlanRequest,
    first_blocks,
    least_recomputation,
    recompute_flags,
)
from paro.precision import BYTES_OF
from paro.report.memory import available_host_bytes
from paro.report.record import PlannedStep
from paro.spec.run_spec import RunSpec
from paro.spec.states import MASTER, adamw_states, bytes_of, is_for_muon, muon_states
from paro.strategy import Strategy
from paro.text import size_text
from paro.training.assembly import run_spec_of


def predict_memory(config: RunConfig, device_type: str) -> DeviceMemory:
    """Return a rank's device memory at its peak, in a step or in an evaluation if that
    needs more."""
    return RunMemory(config.sharding.machine).of(run_spec_of(config, device_type))


def check_memory(config: RunConfig, device: torch.device) -> str | None:
    """Raise `UserError` if the run cannot fit; all ranks must call it before any of them allocates.

    The ranks of a host share its memory. Only what is certain to be too much is refused: what a
    rank's tensors take. Where the estimates of the rest make it too much, a warning is returned.
    """
    memory = predict_memory(config, device.type)
    copy, warning = _async_copy_bytes(config), None
    on_host = copy
    if device.type == "cuda":
        warning = _check_device(config, memory, device)
    else:
        on_host += memory.allocated
    available, ranks = available_host_bytes(), max(1, config.world.ranks_per_node)
    if available is None or on_host * ranks <= available:
        return warning
    remedy = "leave --async-save out"
    if device.type == "cpu":
        remedy = remedy_of(
            config, "cpu", lambda other: (copy + other.allocated) * ranks <= available
        )
    raise UserError(
        f"{count_text(ranks, 'rank')} of this host {'needs' if ranks == 1 else 'need'} "
        f"{size_text(on_host * ranks)} of its memory, and {size_text(available)} can be had: "
        f"{remedy}"
    )


def _check_device(config: RunConfig, memory: DeviceMemory, device: torch.device) -> str | None:
    free, total = torch.cuda.mem_get_info(device)
    left = f"{device} has {size_text(free)} free of {size_text(total)}"
    more = memory.total - memory.context  # this process has its context already
    if more <= free:
        return None
    remedy = remedy_of(config, "cuda", lambda other: other.total - other.context <= free)
    if memory.allocated > free:
        raise UserError(
            f"a rank needs {size_text(memory.allocated)} of device memory at {memory.name}, and "
            f"{left}: {remedy}"
        )
    return (
        f"WARNING: with communicators and fragmentation, which are estimates, a rank needs "
        f"{size_text(more)} of device memory at {memory.name}, and {left}. If it runs out: {remedy}"
    )


def _async_copy_bytes(config: RunConfig) -> int:
    """Return the least that the host copy of --async-save takes: where all ranks share a folder."""
    checkpoint = config.checkpoint
    if checkpoint.save is None or not checkpoint.async_save or config.train.skip_train:
        return 0
    has_base = checkpoint.load is not None and not checkpoint.save_frozen
    return checkpoint_bytes(config, has_base=has_base) // config.world.size


def checkpoint_bytes(config: RunConfig, *, has_base: bool) -> int:
    """What a checkpoint takes: fp32 masters and two moments of what trains.

    Frozen parameters are saved in the type that they are held in, unless they are in its base.
    """
    shapes, trained = parameter_shapes(config.model), config.trained
    precision, by_muon = config.precision, config.precision.optimizer == "muon"

    def of_trained(name: str, shape: Shape) -> int:
        if config.checkpoint.no_save_optim:
            return bytes_of([MASTER])
        has_momentum = by_muon and is_for_muon(name, shape)
        return bytes_of((muon_states if has_momentum else adamw_states)(precision))

    of_frozen = 0 if has_base else BYTES_OF[config.precision.frozen]
    return sum(
        math.prod(shape) * (of_trained(name, shape) if name in trained else of_frozen)
        for name, shape in shapes.items()
    )


def remedy_of(config: RunConfig, device_type: str, fits: Callable[[DeviceMemory], bool]) -> str:
    """What to change where the predicted memory does not fit; first what is surely enough."""
    memory, run = RunMemory(config.sharding.machine), run_spec_of(config, device_type)

    def predicted(recompute: RecomputeConfig | None) -> DeviceMemory:
        return memory.of(replace(run, recompute=recompute))

    enough = least_recomputation(config.model, lambda recompute: fits(predicted(recompute)))
    advice = [] if enough is None else [f"give {recompute_flags(enough)}"]
    contexts = () if run.materialize.rotates else larger_contexts(run)
    fitting = (flags for flags, own in contexts if fits(memory.of(replace(run, context=own))))
    advice += [f"give {flags}" for flags in islice(fitting, 1)]
    if config.batches.micro_batch_size > 1:
        advice.append("lower --micro-batch-size")
    snapshot = predicted(config.model.recompute).allocations
    is_spread = min(run.strategy.degrees) == run.world_size
    if is_spread:
        advice += _more_ranks(config, run, fits, is_recomputed=enough is not None)
    if snapshot.states * 2 > snapshot.total:
        spread_more = ["spread more by --paro-strategy", "start more ranks"]
        advice += [*spread_more * (not is_spread), "take a smaller model"]
    else:
        advice.append("lower --seq-length")
    return ", or ".join(advice)


def _more_ranks(
    config: RunConfig, run: RunSpec, fits: Callable[[DeviceMemory], bool], *, is_recomputed: bool
) -> Iterator[str]:
    """How many ranks are enough where all states are spread over all of them.

    Fewer ones with all blocks recomputed, unless that is enough alone (`is_recomputed`).
    """
    machine, every = config.sharding.machine, first_blocks(config.model.num_layers, config.model)
    step = lcm(run.group_size, config.world.ranks_per_node, run.context.size)
    found: list[int] = []
    for recompute, flags in ((run.recompute, ""), (every, f" with {recompute_flags(every)}")):

        def fits_on(ranks: int, recompute: RecomputeConfig | None = recompute) -> bool:
            strategy = Strategy(name="GGG", params=ranks, grads=ranks, optim=ranks)
            more = replace(run, recompute=recompute, world_size=ranks, strategy=strategy)
            return fits(RunMemory(machine).of(more))

        ranks = fewest_ranks(run.world_size, step, fits_on)
        if ranks is not None and ranks < min(found, default=ranks + 1):
            yield f"start {ranks} ranks{flags}"
            found.append(ranks)
        if is_recomputed:
            return


def bytes_by_part(memory: DeviceMemory) -> dict[str, int]:
    """Return the parts in bytes, under the names that dashboards use; the total of what is
    allocated."""
    always = memory.allocations.parts()
    parts = {name: size for name, size in memory.parts().items() if name in always or size}
    named = {name.replace(" ", "-"): size for name, size in parts.items()}
    return {**named, "total": memory.allocated}


def plan_request_of_run(config: RunConfig, device_type: str) -> PlanRequest | None:
    """Make the plan request of a run; None unless --paro-machine names a device."""
    machine = config.sharding.machine
    if machine is None or machine.device is None:
        return None
    task = TrainingTask(
        config.model,
        config.trainable,
        config.precision,
        config.muon,
        config.data.seq_length,
        RankDevice(device_type, config.launch.device_memory_gb),
        config.data.reset_attention_mask,
    )
    return plan_request_of(task, config.batches, config.sharding)


def planned_step(config: RunConfig, device_type: str) -> PlannedStep | None:
    """What a step of the largest global batch takes; None where the planner cannot say."""
    request = plan_request_of_run(config, device_type)
    if request is None or not config.trained or config.train.skip_train:
        return None
    timeline = Estimator(request).estimate(request.candidate(config.strategy)).timeline
    waits = timeline.exposed
    context = {"context": waits["context"]} if request.context.size > 1 else {}
    return PlannedStep(
        machine=request.machine.name,
        global_batch_size=request.global_batch_size,
        seconds={
            "step": timeline.seconds,
            "computing": timeline.compute_seconds + waits["agree"],
            "gather": waits["gather"],
            "reduce": waits["reduce"] + waits["finish"],
            "publish": waits["publish"],
            **context,
        },
    )
