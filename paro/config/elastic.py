"""What --paro-elastic makes of flags that do not fit the ranks, and which nodes may come."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace

from model.config import LlamaConfig
from paro.config.context_parallel import data_parallel_size_of
from paro.config.inter_bits import AUTO
from paro.distributed.world import World
from paro.errors import UserError, count_text
from paro.machine.files import MEASURE, find_machine
from paro.planning.search_space import legal_strategies
from paro.schedule.batch_schedule import BatchSchedule
from paro.spec.units import rotation_conflict, rotation_infeasible_reason
from paro.strategy import (
    Strategy,
    check_group_size,
    degrees_of,
    fitting_group_size,
    parse_strategy,
    survival,
)
from paro.text import listed

_FLAG = "--paro-elastic"


def fitted_to_ranks(
    args: Namespace, world: World, model: LlamaConfig, strategy: str
) -> tuple[Namespace, tuple[str, ...]]:
    """Return the flags of sharding, `strategy` among them, as these ranks can have them; and a log
    line.

    Groups become the largest that divide those given and the ranks. Degrees, also those of letters,
    that do not fit or do not survive become the finest that do, with those of parameters and
    gradients at most as they were. Where no degrees rotate and survive, parameters are gathered;
    where collectives were measured on other ranks, or cannot be, they are native.
    """
    given_size = args.paro_group_size
    if given_size is not None and given_size < 1:
        check_group_size(world.size, given_size)
    group_size = fitting_group_size(given_size or world.ranks_per_node, world.size)
    survive = min(args.paro_survive, world.num_nodes - 1)
    given = vars(args) | {"paro_strategy": strategy}
    fits = {"paro_survive": survive}
    if given_size is not None:
        fits["paro_group_size"] = group_size

    def kept(one: Strategy) -> int:
        found = survival(one, world_size=world.size, ranks_per_node=world.ranks_per_node)
        return min(found.nodes, survive)

    strategies = [*legal_strategies(world.size, group_size)]
    if args.paro_materialize == "rotate" and rotation_conflict(model) is None:
        rotating = [
            one
            for one in strategies
            if kept(one) == survive
            and not rotation_infeasible_reason(
                one, model, world_size=world.size, group_size=group_size
            )
        ]
        strategies = rotating or strategies
        if not rotating:
            fits |= {"paro_materialize": "gather", "paro_rotate_in_place": False}
    is_named = args.paro_machine not in (None, MEASURE)
    if group_size == world.size and not is_named:  # nothing is measured on one group
        fits["paro_machine"] = None
        fits["paro_collective"] = args.paro_collective.replace(AUTO, "native")
        strategy = strategy.replace(AUTO, "III")
    if strategy != AUTO:
        degrees = degrees_of(strategy)
        if degrees is None:
            spelled = parse_strategy(strategy, world_size=world.size, group_size=group_size)
            degrees = spelled.degrees
        fits["paro_strategy"] = _fitting(strategy, degrees, strategies, kept, survive)
    if args.paro_collective == AUTO and is_named:
        measured_on = find_machine(args.paro_machine).world_size
        fits["paro_collective"] = AUTO if measured_on == world.size else "native"
    changes = [
        f"--{name.replace('_', '-')} {given[name]} is {value}"
        for name, value in fits.items()
        if given[name] != value
    ]
    where = f"on {count_text(world.size, 'rank')} of {count_text(world.num_nodes, 'node')}"
    lines = (f"{_FLAG}: {where} {', '.join(changes)}",) if changes else ()
    return Namespace(**given | fits), lines


def nodes_line(batches: BatchSchedule, world: World, num_sharing: int) -> tuple[str, ...]:
    """Return a log line with the numbers of nodes that the batch allows, unless it allows all up to
    now.

    A ramp-up or a schedule of sizes counts from its beginning: once a size is past it may allow
    more.
    """
    allowed, refusals = [], []
    for num_nodes in range(1, world.num_nodes + 1):
        try:
            left = replace(world, size=num_nodes * world.ranks_per_node)
            readers = data_parallel_size_of(left, num_sharing)
            replace(batches, data_parallel_size=readers).check_from(0)
            allowed.append(str(num_nodes))
        except UserError as error:
            refusals.append(str(error))
    if not refusals:
        return ()
    which = f"{listed(allowed) if allowed else 'none'} of {count_text(world.num_nodes, 'node')}"
    return (f"{_FLAG}: the batch allows a restart on {which}: {refusals[0]}",)


def _fitting(
    text: str,
    degrees: tuple[int, int, int],
    strategies: Sequence[Strategy],
    kept: Callable[[Strategy], int],
    survive: int,
) -> str:
    """`text` if one of the strategies has its degrees and survives, else the best one's degrees."""
    if any(one.degrees == degrees and kept(one) == survive for one in strategies):
        return text
    coarser = [one for one in strategies if one.params <= degrees[0] and one.grads <= degrees[1]]
    best = max(coarser or strategies, key=lambda one: (kept(one), one.optim, one.grads, one.params))
    return ",".join(map(str, best.degrees))
