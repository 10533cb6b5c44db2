"""Elastic runs: fits flags to the ranks of a restart; finds strategies that survive lost nodes."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from model.config import LlamaConfig
from paro.config.context_parallel import AUTO, data_parallel_size_of
from paro.config.sharding import ShardingConfig, TrainingTask, strategy_text
from paro.distributed.world import World
from paro.errors import UserError, count_text, flag_of
from paro.machine.files import MEASURE, find_machine
from paro.planning.search_space import legal_strategies
from paro.precision import PrecisionConfig
from paro.schedule.batch_schedule import BatchSchedule
from paro.spec.offload import state_bytes
from paro.spec.run_spec import RunSpec
from paro.spec.strategy_limits import StrategyLimits, rotation_conflict
from paro.spec.units import units_of_run
from paro.strategy import (
    FLAG,
    Strategy,
    check_group_size,
    degrees_of,
    fitting_group_size,
    parse_strategy,
)
from paro.text import listed, size_text

_FLAG = "--paro-elastic"


class FittedArguments(NamedTuple):
    """The arguments that fit the ranks of this start, with log lines about their changes."""

    args: Namespace
    elastic_lines: tuple[str, ...]


def fitted_to_ranks(args: Namespace, world: World, model: LlamaConfig) -> FittedArguments:
    """Fit the sharding flags to the ranks of this start if --paro-elastic is given.

    - Group size: the largest divisor of both the given group size and the world size.
    - Degrees that do not fit or survive: the largest that do, params and grads not above the given.
    - --paro-materialize rotate with no surviving degrees: gather.
    - --paro-collective auto measured on another world size, or not measurable: native.
    """
    if not args.paro_elastic:
        return FittedArguments(args, ())
    given_size, strategy = args.paro_group_size, strategy_text(args)
    if given_size is not None and given_size < 1:
        check_group_size(world.size, given_size)
    group_size = fitting_group_size(given_size or world.ranks_per_node, world.size)
    survive = min(args.paro_survive, world.num_nodes - 1)
    flags = vars(args) | {"paro_strategy": strategy}
    flags["use_distributed_optimizer"] &= args.paro_strategy is not None  # its strategy is fitted
    fits = {"paro_survive": survive}
    if given_size is not None:
        fits["paro_group_size"] = group_size
    limits = StrategyLimits(world.size, group_size, world.ranks_per_node, survive)
    strategies = [*legal_strategies(world.size, group_size)]
    if args.paro_materialize == "rotate" and rotation_conflict(model) is None:
        rotating = [each for each in strategies if not limits.infeasible_reason(each, model)]
        strategies = rotating or strategies
        if not rotating:
            fits |= {"paro_materialize": "gather", "paro_rotate_in_place": False}
    is_named = args.paro_machine not in (None, MEASURE)
    if group_size == world.size and not is_named:  # with one group there is nothing to measure
        fits["paro_machine"] = None
        fits["paro_collective"] = args.paro_collective.replace(AUTO, "native")
        strategy = strategy.replace(AUTO, "III")
    if strategy != AUTO:
        degrees = degrees_of(strategy)
        if degrees is None:
            degrees = parse_strategy(strategy, world_size=world.size, group_size=group_size).degrees
        fits["paro_strategy"] = _fitting(strategy, degrees, strategies, limits)
    if args.paro_collective == AUTO and is_named:
        measured_on = find_machine(args.paro_machine).world_size
        fits["paro_collective"] = AUTO if measured_on == world.size else "native"
    changes = [
        f"{flag_of(name)} {flags[name]} is {value}"
        for name, value in fits.items()
        if flags[name] != value
    ]
    where = f"on {count_text(world.size, 'rank')} of {count_text(world.num_nodes, 'node')}"
    lines = (f"{_FLAG}: {where} {', '.join(changes)}",) if changes else ()
    return FittedArguments(Namespace(**flags | fits), lines)


def nodes_line(batches: BatchSchedule, world: World, context_parallel_size: int) -> tuple[str, ...]:
    """Build a log line with the node counts that the batch sizes divide over, unless all do.

    All sizes of a ramp-up or step schedule count, also sizes that the run has already passed.
    """
    allowed, refusals = [], []
    for num_nodes in range(1, world.num_nodes + 1):
        try:
            left = replace(world, size=num_nodes * world.ranks_per_node)
            data_parallel_size = data_parallel_size_of(left, context_parallel_size)
            replace(batches, data_parallel_size=data_parallel_size).check_from(0)
            allowed.append(str(num_nodes))
        except UserError as error:
            refusals.append(str(error))
    if not refusals:
        return ()
    which = f"{listed(allowed) if allowed else 'none'} of {count_text(world.num_nodes, 'node')}"
    return (f"{_FLAG}: the batch allows a restart on {which}: {refusals[0]}",)


def _fitting(
    text: str, degrees: tuple[int, int, int], strategies: Sequence[Strategy], limits: StrategyLimits
) -> str:
    """Return `text` if a surviving strategy has `degrees`, else the best strategy's degrees."""

    def losable(each: Strategy) -> int:
        return min(limits.survival(each).nodes, limits.survive)

    if any(each.degrees == degrees and limits.loss_reason(each) is None for each in strategies):
        return text
    coarser = [
        each for each in strategies if each.params <= degrees[0] and each.grads <= degrees[1]
    ]
    best = max(
        coarser or strategies, key=lambda each: (losable(each), each.optim, each.grads, each.params)
    )
    return ",".join(map(str, best.degrees))


def check_strategy(
    task: TrainingTask,
    precision: PrecisionConfig,
    batches: BatchSchedule,
    sharding: ShardingConfig,
    strategy: Strategy,
) -> None:
    """Raise `UserError` if the run cannot have the strategy.

    If states do not survive the loss of nodes, the error names the nearest degrees that do.
    """
    limits, task = sharding.limits, task._replace(precision=precision)
    limits.check_nodes()
    run = task.run_spec(batches, sharding, strategy, task.trainable.names(task.model))
    reason = limits.infeasible_reason(strategy, run.rotated)
    if reason is None:
        return
    if limits.loss_reason(strategy) is None:
        raise UserError(reason)
    advice = "no degrees hold it with --paro-materialize rotate: leave that out"
    if sharding.outer is not None:
        advice = "give more groups, by --paro-group-size"
    nearest = nearest_surviving(run, limits)
    if nearest is not None:
        degrees, more = nearest
        advice = (
            f"the nearest that holds it is {FLAG} {degrees}, with {size_text(abs(more))} "
            f"{'more' if more >= 0 else 'less'} of model states a rank"
        )
    raise UserError(f"{reason}; {advice}")


def nearest_surviving(run: RunSpec, limits: StrategyLimits) -> tuple[str, int] | None:
    """Find the nearest degrees that survive the loss of nodes, and their extra bytes per rank.

    Nearest: least change of the params and grads degrees, then least model states per rank.
    """

    def held_bytes(strategy: Strategy) -> int:
        other = replace(run, strategy=strategy)
        return state_bytes(other.specs(units_of_run(other))).total

    def distance(other: Strategy) -> tuple[float, int]:
        ratios = (other.params / run.strategy.params, other.grads / run.strategy.grads)
        return sum(abs(math.log(ratio)) for ratio in ratios), held_bytes(other)

    holding = (
        each
        for each in legal_strategies(run.world_size, run.group_size)
        if not limits.infeasible_reason(each, run.rotated)
    )
    nearest = min(holding, key=distance, default=None)
    if nearest is None:
        return None
    more = held_bytes(nearest) - held_bytes(run.strategy)
    return ",".join(map(str, nearest.degrees)), more
