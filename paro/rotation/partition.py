"""Partitions a model into parts whose weights rotate and units that are replicated (norms)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from model.units import UnitSpec
from paro.collectives.shifts import Ring
from paro.rotation.part import Half, RotatingPart
from paro.rotation.rotating_unit import RotatingUnit
from paro.sharding.distributed_model import MicroBatchState
from paro.sharding.sharded_unit import ShardedUnit
from paro.sharding.shards import ShardingContext
from paro.sharding.wrap import bind_empty
from paro.step.units import UnitSize, buffers_of
from paro.strategy import make_comm_plan, replicated


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The rotating parts of a model, and the units that hold its parameters."""

    parts: tuple[RotatingPart, ...]
    rotating: tuple[RotatingUnit, ...]
    replicated: tuple[ShardedUnit, ...]  # norms
    state: MicroBatchState


def cut_into_parts(
    model: nn.Module,
    specs: Sequence[UnitSpec],
    units: Sequence[UnitSize],
    context: ShardingContext,
    ring: Ring,
    *,
    in_place: bool,
) -> Parts:
    """The parts of a model built on the meta device; only the shards are allocated.

    The matrices of a part are stored slice by slice in `units` of their own, of which it has two
    if slices rotate in two halves. A part of a unit that borrows parameters, such as a tied head,
    uses the borrowed unit's.
    """
    bound = bind_empty(model, units, context)
    halves: defaultdict[str, list[Half]] = defaultdict(list)  # by the label of their matrices
    for unit in units:
        if not unit.replicated:
            halves[unit.part].append(
                tuple(RotatingUnit(b, context, ring, in_place=in_place) for b in buffers_of([unit]))
            )
    state = MicroBatchState()
    parts = tuple(
        RotatingPart(model.get_submodule(spec.name), spec, part, halves[spec.label_of(part)], state)
        for spec in specs
        for part in spec.parts
    )
    strategy = replicated(context.strategy)
    comm_plan = make_comm_plan(strategy, context.topology)
    of_norms = replace(context, strategy=strategy, comm_plan=comm_plan)
    norms = tuple(ShardedUnit(b, of_norms) for b in buffers_of(units) if b.unit.replicated)
    for norm in norms:
        norm.bind(bound)
    rotating = tuple(unit for own in halves.values() for half in own for unit in half)
    return Parts(parts=parts, rotating=rotating, replicated=norms, state=state)
