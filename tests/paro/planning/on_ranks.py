"""Strategies on any world size, without ranks."""

from __future__ import annotations

from paro.strategy import Strategy, parse_strategy
from paro.topology import Topology, make_topology


def on_ranks(text: str, *, world_size: int, group_size: int) -> tuple[Strategy, Topology]:
    """A strategy and the topology of its degrees."""
    strategy = parse_strategy(text, world_size=world_size, group_size=group_size)
    return strategy, make_topology(
        world_size=world_size, group_size=group_size, degrees=strategy.degrees
    )
