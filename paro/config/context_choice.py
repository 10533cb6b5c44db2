"""Chooses how many ranks share a sample, and what they send, where a flag says auto."""

# The step that the planner predicts decides: of all that fits the fastest, among equally fast ones
# the fewest ranks. C ranks that share a sample make C times as many micro-batches of a step, and
# leave memory for larger ones: with C also micro-batches of up to C times as many samples are
# compared, which are then as many as without. A run that continues keeps what it had.

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from model.config import LlamaConfig
from paro.checkpoint.config import CheckpointConfig
from paro.config.checkpoint import resumed_arguments
from paro.config.context_parallel import (
    AUTO,
    TYPES,
    ContextParallelConfig,
    sharing,
    take_context,
    ways,
    without_machine,
)
from paro.config.parts import take_batches
from paro.config.plan import RankDevice, Taken, case_of
from paro.distributed.world import World
from paro.errors import UserError
from paro.planning.machine.files import MEASURE
from paro.planning.search.description import seconds_text
from paro.planning.search.estimator import Estimate, Estimator
from paro.planning.search.planner import TIE, best_that_fits
from paro.planning.search.search_space import SearchSpace, Workload
from paro.planning.search.trainable import Trainable
from paro.precision import PrecisionConfig
from paro.strategy import Strategy

_SIZE, _TYPE = "--context-parallel-size", "--cp-comm-type"
WORTH = 0.05  # share of a step that another type must save to be named

Make = Callable[[ContextParallelConfig, int], Workload]


class Sharing(NamedTuple):
    """A way to share samples, the workload with it, and the best candidate that fits."""

    way: ContextParallelConfig
    workload: Workload
    best: Estimate | None


def compared(
    found: Iterable[ContextParallelConfig],
    make: Make,
    micro_batch_size: int,
    space: SearchSpace,
    *,
    grows: bool,
) -> list[Sharing]:
    """The ways for which `make` gives a workload, those that fit first, fastest first.

    Where a micro-batch `grows`, it has up to as many times the samples as ranks share them.
    """
    sharings = []
    for way in found:
        workloads = {}
        most = way.context_parallel_size if grows else 1
        for size in (n * micro_batch_size for n in range(1, most + 1) if most % n == 0):
            try:
                workloads[size] = make(way, size)
            except UserError:  # the batch is no multiple
                continue
        if workloads:
            workload = next(iter(workloads.values()))
            own = replace(space, micro_batch_sizes=tuple(workloads))
            sharings.append(Sharing(way, workload, best_that_fits(workload, own)))
    fitting = [one for one in sharings if one.best is not None]
    least = min((_seconds(one) for one in fitting), default=0.0)

    def order(one: Sharing) -> tuple[object, ...]:
        tied = one.best is not None and _seconds(one) <= least * (1 + TIE)
        size = one.way.context_parallel_size
        return one.best is None, 0.0 if tied else _seconds(one), size

    return sorted(sharings, key=order)


def _seconds(one: Sharing) -> float:
    return 0.0 if one.best is None else one.best.seconds


def describe_choice(flag: str, chosen: Sharing, others: Sequence[Sharing]) -> list[str]:
    """Lines about a choice among ways to share samples."""
    if chosen.best is None:
        return [f"planner: {flag} auto: {chosen.way.describe()}, which needs least: nothing fits"]
    seconds = chosen.best.seconds
    text = (
        f"planner: {flag} auto: {chosen.way.describe()}, micro-batches of "
        f"{chosen.best.candidate.micro_batch_size}: {seconds_text(seconds)} a step, the best of "
        f"{1 + len(others)} ways"
    )
    sizes = {chosen.way.context_parallel_size}
    told = []
    for one in others:
        if one.way.context_parallel_size not in sizes or flag == _TYPE:
            sizes.add(one.way.context_parallel_size)
            more = "does not fit" if one.best is None else f"{_seconds(one) / seconds - 1:.1%} more"
            told.append(f"{one.way.describe()}: {more}")
    return [text, f"planner: {'; '.join(told)}"] if told else [text]


def with_context(
    args: Namespace,
    taken: Callable[[Namespace], Taken],
    model: LlamaConfig,
    trainable: Trainable,
    precision: PrecisionConfig,
    device: RankDevice,
    checkpoint: CheckpointConfig,
) -> tuple[Namespace, tuple[str, ...]]:
    """The flags with what auto stands for, and log lines; what it stands for until measured."""
    any_size, any_type = args.context_parallel_size == AUTO, {*args.cp_comm_type} == {AUTO}
    if not any_size and not any_type:
        return args, ()
    flag = _SIZE if any_size else _TYPE
    sharding, strategy, _ = taken(args)
    world = sharding.world
    if sharding.materialize == "rotate":
        return _with(args, replace(take_context(args), context_parallel_size=1).flags), ()
    found = _ways(args, world, sharding.world.group_size, model)
    if not found:  # check_context says why
        return _with(args, take_context(args).flags), ()

    def make(way: ContextParallelConfig, micro_batch_size: int) -> Workload:
        own = _with(args, way.flags | {"micro_batch_size": micro_batch_size})
        shared = sharing(sharding.world, way.context_parallel_size)
        return case_of(
            model, take_batches(own, shared), replace(sharding, context=way, world=shared),
            precision, trainable, seq_length=args.seq_length, device=device,
        )  # fmt: skip

    if (kept := _kept(args, world, found, checkpoint)) is not None:
        return _with(args, kept), (f"{flag} auto: as in --load {checkpoint.load}",)
    if not any_size and (sharding.machine is None or sharding.machine.device is None):
        way = without_machine(found, sharding.world.group_size)
        line = f"{flag} auto: {way.describe()}; --paro-machine would compare times"
        return _with(args, way.flags), (line,)
    if sharding.is_unmeasured:
        return _with(args, found[0].flags), ()
    if sharding.machine is None:
        raise UserError(f"{flag} auto: give --paro-machine, a shipped name, a file or {MEASURE}")
    if any_size and args.global_batch_size is args.step_batch_size_schedule is None:
        raise UserError(f"{flag} auto compares steps of one batch: give --global-batch-size")
    space = SearchSpace(
        strategies=None if strategy is None else (strategy,),
        collectives=(sharding.collective,),
        recomputes=(model.recompute,),
    )
    size = args.micro_batch_size
    sharings = compared(found, make, size, space, grows=any_size)
    if not sharings:
        make(found[0], size)  # says why
    chosen, *others = sharings
    if chosen.best is None:  # what follows says how much it needs
        chosen = min(sharings, key=lambda one: _least_bytes(one.workload, strategy))
    else:
        size = chosen.best.candidate.micro_batch_size
    fields = chosen.way.flags | {"micro_batch_size": size}
    return _with(args, fields), tuple(describe_choice(flag, chosen, others))


def _ways(
    args: Namespace, world: World, group_size: int, model: LlamaConfig
) -> list[ContextParallelConfig]:
    """Those among which the flags let choose."""
    sizes: Sequence[int] = (args.context_parallel_size,)
    if args.context_parallel_size == AUTO:
        sizes = [n for n in range(1, world.size + 1) if world.size % n == 0]
    given = take_context(args)
    found = ways(
        given,
        sizes,
        TYPES if {*args.cp_comm_type} == {AUTO} else (given.cp_comm_type,),
        model,
        world_size=world.size,
        group_size=group_size,
        seq_length=args.seq_length,
    )
    return [*found]


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
                take_batches(_with(args, fields), sharing(world, way.context_parallel_size))
            except UserError:
                return None
            return fields
    return None


def _least_bytes(workload: Workload, strategy: Strategy | None) -> int:
    least = workload.strategy("GGG") if strategy is None else strategy
    return Estimator(workload).memory(workload.candidate(least)).total


def _with(args: Namespace, fields: Mapping[str, object]) -> Namespace:
    return Namespace(**vars(args) | dict(fields))


def faster_type(given: ContextParallelConfig, workload: Workload, strategy: Strategy) -> str | None:
    """The flags of another type if a step is predicted to be clearly faster with it, and fits."""
    candidate = workload.candidate(strategy)
    own = Estimator(workload).estimate(candidate).seconds
    least, fastest = own / (1 + WORTH), None
    for way in ways(
        replace(given, hierarchical_context_parallel_sizes=None),
        [given.context_parallel_size],
        TYPES,
        workload.model,
        world_size=workload.world_size,
        group_size=workload.group_size,
        seq_length=workload.seq_length,
    ):
        estimator = Estimator(replace(workload, context=way.layout))
        if estimator.costs(candidate).least_seconds() < least:
            estimate = estimator.estimate(candidate)
            if estimate.fits and estimate.seconds < least:
                least, fastest = estimate.seconds, way
    if fastest is None:
        return None
    return f"{fastest.flag_text} would be {own / least - 1:.0%} faster, as the planner predicts"
