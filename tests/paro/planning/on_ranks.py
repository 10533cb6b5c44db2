"""Strategies, runs, and a model of one unit, on any world size, without ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from model.config import LlamaConfig
from model.units import parameter_shapes
from paro.layout import Unit, UnitLayout
from paro.precision import PrecisionConfig
from paro.spec.run_spec import RunSpec
from paro.step.actions import Move, Verb
from paro.strategy import Strategy, parse_strategy
from paro.topology import Topology, make_topology


def on_ranks(text: str, *, world_size: int, group_size: int) -> tuple[Strategy, Topology]:
    """A strategy and the topology of its degrees."""
    strategy = parse_strategy(text, world_size=world_size, group_size=group_size)
    return strategy, make_topology(
        world_size=world_size, group_size=group_size, degrees=strategy.degrees
    )


def run_of(
    config: LlamaConfig,
    text: str,
    precision: PrecisionConfig,
    *,
    world_size: int = 8,
    group_size: int = 4,
    is_trained: Callable[[str], bool] = lambda _name: True,
    **changes: Any,
) -> RunSpec:
    """A run of two micro-batches of one sample, as the planner sees it."""
    given: dict[str, Any] = {
        "recompute": config.recompute,
        "seq_length": 16,
        "micro_batch_size": 1,
        "num_micro_batches": 2,
    }
    return RunSpec(
        model=config,
        trained=frozenset(filter(is_trained, parameter_shapes(config))),
        strategy=parse_strategy(text, world_size=world_size, group_size=group_size),
        precision=precision,
        world_size=world_size,
        group_size=group_size,
        **(given | changes),
    )


def one_unit(numel: int, *, frozen: int = 0) -> tuple[Unit, ...]:
    """A model as the paper counts it: everything is gathered twice per micro-batch."""
    trainable, rest = (UnitLayout((), matrix_stop=0, numel=size) for size in (numel, frozen))
    return (Unit(name="all", trainable=trainable, frozen=rest),)


def moves(count: int, *, frozen: int = 0) -> dict[Move, int]:
    """How often its collectives come in a step of `count` micro-batches."""
    of_step = {(Verb.GRAD_SYNC, 0): 1, (Verb.PARAM_ALL_GATHER, 0): 1, (Verb.REDUCE, 0): count}
    return of_step | {(Verb.GATHER, buffer): 2 * count for buffer in range(1 + bool(frozen))}
