"""Takes from flags how states are sharded and on which machine; makes the plan request."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from model.config import LlamaConfig
from model.trainable import Trainable
from paro.arguments.parser import take
from paro.config.context_parallel import take_context
from paro.config.elastic import fitted_to_ranks
from paro.config.inter_bits import AUTO
from paro.config.sharding import ShardingConfig, units_ahead
from paro.distributed.world import World
from paro.errors import UserError
from paro.machine.files import (
    MEASURE,
    find_machine,
    machine_of_launch,
    why_unmeasurable,
)
from paro.planning.search_space import PlanRequest, legal_strategies
from paro.precision import PrecisionConfig
from paro.schedule.batch_schedule import BatchSchedule
from paro.spec.muon_rounds import in_buckets
from paro.spec.optim_config import MuonConfig
from paro.spec.run_spec import Materialize
from paro.spec.sharding_spec import specs_of, state_bytes
from paro.spec.units import rotation_infeasible_reason, units_of
from paro.strategy import FLAG, Strategy, check_group_size, check_nodes, parse_strategy, survival
from paro.text import size_text

DEFAULT_STRATEGY = "IIG"
DISTRIBUTED_OPTIMIZER_STRATEGY = "NNG"


class ShardingFlags(NamedTuple):
    """The sharding of model states as far as flags say it, and log lines."""

    sharding: ShardingConfig
    strategy: Strategy | None  # None: the planner chooses it
    lines: tuple[str, ...]
    is_unmeasured: bool  # the ranks are to measure their machine, and then plan


def take_sharding(args: Namespace, world: World, model: LlamaConfig) -> ShardingFlags:
    """Take the sharding of model states, in groups and on a machine that these ranks can have."""
    given = text = args.paro_strategy
    if text is None:
        zero1 = args.use_distributed_optimizer
        text = DISTRIBUTED_OPTIMIZER_STRATEGY if zero1 else DEFAULT_STRATEGY
    lines: tuple[str, ...] = ()
    if args.paro_elastic:
        args, lines = fitted_to_ranks(args, world, model, text)
        text = args.paro_strategy
    machine = None
    group_size = world.ranks_per_node if args.paro_group_size is None else args.paro_group_size
    check_group_size(world.size, group_size)
    if args.paro_machine not in (None, MEASURE):
        machine, group_size = machine_of_launch(
            find_machine(args.paro_machine),
            world_size=world.size,
            ranks_per_node=world.ranks_per_node,
            group_size=args.paro_group_size,
            any_ranks=args.paro_elastic,
        )
    by_nccl = args.distributed_backend == "nccl"
    if machine is not None and by_nccl:
        machine = replace(machine, launch_order=args.paro_nccl_launch_order)
    strategy = None
    if text != AUTO:
        strategy = parse_strategy(text, world_size=world.size, group_size=group_size)
    degrees = strategy.degrees if strategy else None
    if args.use_distributed_optimizer and given and degrees != (1, 1, world.size):
        raise UserError(
            f"--use-distributed-optimizer means --paro-strategy {DISTRIBUTED_OPTIMIZER_STRATEGY} "
            f"and contradicts --paro-strategy {given}: give one of them"
        )
    ahead = units_ahead(args.paro_updated_ahead, args.paro_prefetch_units, by_nccl=by_nccl)
    sharding = take(
        ShardingConfig,
        args,
        world=replace(world, group=group_size),
        context=take_context(args),
        updated_ahead=ahead,
        machine=machine,
    )
    autos = {FLAG: text, "--paro-collective": args.paro_collective}
    if group_size < world.size:
        autos["--paro-inter-bits"] = args.paro_inter_bits
    flags = [f"{flag} {AUTO}" for flag, value in autos.items() if value == AUTO]
    is_unmeasured = machine is None and (bool(flags) or args.paro_machine == MEASURE)
    if is_unmeasured:
        check_measurable(flags or [f"--paro-machine {MEASURE}"], sharding.world, args.dry_run)
    return ShardingFlags(sharding, strategy, lines, is_unmeasured)


def check_measurable(flags: Sequence[str], world: World, dry_run: bool) -> None:
    """Raise `UserError` where no machine can be measured at the start of a run, which
    `flags` want."""
    why = why_unmeasurable(world.size, world.group_size, dry_run=dry_run)
    if why is not None:
        raise UserError(
            f"{' and '.join(flags)}: the machine cannot be measured, {why}: give --paro-machine, a "
            "shipped name or a file that a training or tools/bench_collectives.py wrote"
        )


class RankDevice(NamedTuple):
    """The device of a rank."""

    type: str
    memory_gb: float | None = None  # None: the machine's own

    @classmethod
    def of(cls, backend: str, memory_gb: float | None) -> RankDevice:
        """Return the device that a backend sends from."""
        return cls("cpu" if backend == "gloo" else "cuda", memory_gb)


class TrainingTask(NamedTuple):
    """The model, data types and sequence that the ranks of a run train, and their devices."""

    model: LlamaConfig
    trainable: Trainable
    precision: PrecisionConfig
    muon: MuonConfig
    seq_length: int
    device: RankDevice
    apart: bool = False  # whether documents of a sample are kept apart


def plan_request_of(
    task: TrainingTask, batches: BatchSchedule, sharding: ShardingConfig
) -> PlanRequest:
    """Make the plan request of a run whose machine is known."""
    assert sharding.machine is not None, "measured, or from --paro-machine"
    device = task.device
    return PlanRequest(
        model=task.model,
        machine=sharding.machine,
        group_size=sharding.world.group_size,
        context=sharding.context.layout,
        seq_length=task.seq_length,
        apart=task.apart,
        micro_batch_size=batches.micro_batch_size,
        eval_micro_batch_size=batches.eval_micro_batch_size or 0,
        global_batch_size=batches.global_batch_size,
        precision=task.precision,
        muon=task.muon,
        prefetch_units=sharding.prefetch_units,
        updated_ahead=sharding.updated_ahead,
        collective=sharding.collective,
        materialize=Materialize.of_flags(sharding.materialize, sharding.rotate_in_place),
        device_type=device.type,
        memory_bytes=None if device.memory_gb is None else round(device.memory_gb * 1e9),
        ranks_per_node=sharding.world.ranks_per_node,
        survive=sharding.survive,
        trainable=task.trainable,
        chooses_bits=sharding.inter_bits is not None,
    )


def check_survival(
    sharding: ShardingConfig,
    strategy: Strategy,
    model: LlamaConfig,
    trainable: Trainable,
    precision: PrecisionConfig,
) -> None:
    """Raise `UserError` unless a strategy holds every state after the losses of --paro-survive.

    It names the nearest degrees that do.
    """
    world = sharding.world
    check_nodes(sharding.survive, world.size, world.ranks_per_node)
    kept = survival(strategy, world_size=world.size, ranks_per_node=world.ranks_per_node)
    if kept.nodes >= sharding.survive:
        return
    advice = "no degrees hold it with --paro-materialize rotate: leave that out"
    found = nearest_surviving(sharding.survive, sharding, strategy, model, trainable, precision)
    if found is not None:
        degrees, more = found
        advice = (
            f"the nearest that holds it is {FLAG} {degrees}, with {size_text(abs(more))} "
            f"{'more' if more >= 0 else 'less'} of model states a rank"
        )
    raise UserError(
        f"--paro-survive {sharding.survive}: under {FLAG} {strategy.name} {kept.describe()}; "
        f"{advice}"
    )


def nearest_surviving(
    survive: int,
    sharding: ShardingConfig,
    strategy: Strategy,
    model: LlamaConfig,
    trainable: Trainable,
    precision: PrecisionConfig,
) -> tuple[str, int] | None:
    """Return the nearest degrees that survive the loss of so many nodes, and their bytes more a
    rank.

    Those of params and grads change least, then the model states of a rank take least.
    """
    world, rotates = sharding.world, sharding.materialize == "rotate"
    trained = trainable.names(model)

    def held_bytes(strategy: Strategy) -> int:
        degree = strategy.params if rotates else 1
        in_place = sharding.rotate_in_place
        units = units_of(
            model,
            world_size=world.size,
            is_trained=trained.__contains__,
            rotated_over=degree,
            in_place=in_place,
        )
        bucketed = in_buckets(units, strategy, precision, world.group_size)
        topology = world.topology(*strategy.degrees)
        return state_bytes(specs_of(bucketed, strategy, topology, precision)).total

    def distance(other: Strategy) -> tuple[float, int]:
        ratios = (other.params / strategy.params, other.grads / strategy.grads)
        return sum(abs(math.log(ratio)) for ratio in ratios), held_bytes(other)

    def holds(other: Strategy) -> bool:
        node = world.ranks_per_node
        if survival(other, world_size=world.size, ranks_per_node=node).nodes < survive:
            return False
        return not rotates or not rotation_infeasible_reason(
            other, model, world_size=world.size, group_size=world.group_size
        )

    holding = filter(holds, legal_strategies(world.size, world.group_size))
    nearest = min(holding, key=distance, default=None)
    if nearest is None:
        return None
    more = held_bytes(nearest) - held_bytes(strategy)
    return ",".join(map(str, nearest.degrees)), more
