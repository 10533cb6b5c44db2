"""Chooses how many ranks share a sample, and what they send, where a flag says auto."""

# A run that continues on as many ranks keeps what it had; else predicted steps decide, or without a
# machine links and heads.

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace

from paro.checkpoint.config import CheckpointConfig
from paro.config.checkpoint import resumed_arguments
from paro.config.context_parallel import (
    AUTO,
    ContextParallelConfig,
    sharing,
    take_context,
    without_machine,
)
from paro.config.context_search import asked, choose, types_asked, ways_asked
from paro.config.fitting import with_values
from paro.config.parts import take_batches
from paro.config.plan import Taken, Task, case_of, check_measurable
from paro.context_parallel.layout import ContextLimits
from paro.distributed.world import World
from paro.errors import UserError
from paro.machine.files import MEASURE
from paro.planning.search.search_space import SearchSpace, Workload


def with_context(
    args: Namespace,
    taken: Callable[[Namespace], Taken],
    task: Task,
    checkpoint: CheckpointConfig,
) -> tuple[Namespace, tuple[str, ...]]:
    """The flags with what auto stands for, and log lines; what it stands for until measured."""
    if (flag := asked(args)) is None:
        return args, ()
    sharding, strategy, _ = taken(args)
    world = sharding.world
    if sharding.materialize == "rotate":
        return with_values(args, replace(take_context(args), context_parallel_size=1).flags), ()
    group_size = sharding.world.group_size
    model = task.model
    types = types_asked(args, model, task.device.type, task.precision.compute)
    limits = ContextLimits.of(
        model, world_size=world.size, group_size=group_size, seq_length=args.seq_length
    )
    found = ways_asked(args, types, limits)
    if not found:  # RunConfig.check says why
        return with_values(args, take_context(args).flags), ()

    def make(way: ContextParallelConfig, micro_batch_size: int) -> Workload:
        own = with_values(args, way.flags | {"micro_batch_size": micro_batch_size})
        shared = sharing(sharding.world, way.context_parallel_size)
        own_sharding = replace(sharding, context=way, world=shared)
        return case_of(task, take_batches(own, shared), own_sharding)

    if (kept := _kept(args, world, found, checkpoint)) is not None:
        return with_values(args, kept), (f"{flag} auto: as in --load {checkpoint.load}",)
    any_size = args.context_parallel_size == AUTO
    if not any_size and (sharding.machine is None or sharding.machine.device is None):
        way = without_machine(found, group_size)
        line = f"{flag} auto: {way.describe()}; --paro-machine would compare times"
        return with_values(args, way.flags), (line,)
    if sharding.is_unmeasured:
        return with_values(args, found[0].flags), ()
    if sharding.machine is None:
        check_measurable([f"{flag} auto"], sharding.world, args.dry_run)
        raise UserError(f"{flag} auto: give --paro-machine, a shipped name, a file or {MEASURE}")
    if any_size and args.global_batch_size is args.step_batch_size_schedule is None:
        raise UserError(f"{flag} auto compares steps of one batch: give --global-batch-size")
    space = SearchSpace(
        strategies=None if strategy is None else (strategy,),
        collectives=(sharding.collective,),
        recomputes=(model.recompute,),
    )
    fields, lines = choose(flag, found, make, args.micro_batch_size, space)
    return with_values(args, fields), lines


def _kept(
    args: Namespace,
    world: World,
    found: Sequence[ContextParallelConfig],
    checkpoint: CheckpointConfig,
) -> dict[str, object] | None:
    """What a run had that continues on as many ranks, if it still can."""
    saved = resumed_arguments(checkpoint)
    if saved.get("world_size") != world.size:
        return None
    for way in found:
        if all(saved.get(name) == value for name, value in way.flags.items()):
            fields = way.flags
            if args.context_parallel_size == AUTO:
                fields |= {"micro_batch_size": saved.get("micro_batch_size")}
            try:
                take_batches(with_values(args, fields), sharing(world, way.context_parallel_size))
            except UserError:
                return None
            return fields
    return None
