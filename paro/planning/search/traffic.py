"""Bytes that a rank of a run sends in a step: model states, and what attention needs."""

from __future__ import annotations

from collections.abc import Sequence

from paro.distributed.byte_counter import Sent
from paro.planning.context_parallel import context_traffic
from paro.planning.cost_model import UnitSize, traffic_per_step
from paro.planning.search.run_memory import RunPlan
from paro.topology import make_topology


def sent_per_step(
    plan: RunPlan, units: Sequence[UnitSize], num_micro_batches: int, rank: int = 0
) -> Sent:
    """Bytes sent in a step of so many micro-batches; `units` are the plan's."""
    strategy = plan.strategy
    topology = make_topology(
        world_size=plan.world_size, group_size=plan.group_size, degrees=strategy.degrees
    )
    states = traffic_per_step(strategy, topology, units, plan.precision, num_micro_batches)
    attention = context_traffic(plan.config, plan.batch, units, topology, rank)
    return states + attention * num_micro_batches
