"""Partitions a model into parts whose weights rotate and units that are replicated (norms)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from model.units import UnitSpec
from paro.collectives.shifts import Ring
from paro.rotation.part import Half, RotatingPart
from paro.rotation.rotating_unit import RotatingUnit
from paro.sharding.distributed_model import MicroBatchState
from paro.sharding.sharded_unit import ShardedUnit
from paro.sharding.shards import ShardingContext
from paro.sharding.wrap import bind_empty
from paro.spec.sharding_spec import ShardingSpec
from paro.step.units import UnitSize


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The rotating parts of a model, and the units that hold its parameters."""

    parts: tuple[RotatingPart, ...]
    rotating: tuple[RotatingUnit, ...]
    replicated: tuple[ShardedUnit, ...]  # norms
    state: MicroBatchState


def cut_into_parts(
    model: nn.Module,
    unit_specs: Sequence[UnitSpec],
    specs: Sequence[ShardingSpec],
    context: ShardingContext,
    ring: Ring,
    *,
    in_place: bool,
) -> Parts:
    """The parts of a model built on the meta device; only the shards are allocated.

    The matrices of a part are stored slice by slice in units of their own, of which it has two if
    slices rotate in two halves. A part of a unit that borrows parameters, such as a tied head, uses
    the borrowed unit's.
    """
    bound = bind_empty(model, specs, context)
    norms = tuple(ShardedUnit(spec, context) for spec in specs if spec.unit.replicated)
    for norm in norms:
        norm.bind(bound)
    weights = [spec for spec in specs if not spec.unit.replicated]
    rotating = tuple(RotatingUnit(spec, context, ring, in_place=in_place) for spec in weights)
    halves: defaultdict[str, dict[UnitSize, Half]] = defaultdict(dict)  # by their matrices' label
    for unit in rotating:
        of_part, half = halves[unit.spec.unit.part], unit.spec.unit
        of_part[half] = (*of_part.get(half, ()), unit)
    state = MicroBatchState()
    parts = tuple(
        RotatingPart(model.get_submodule(unit.name), unit, part, held, state)
        for unit in unit_specs
        for part in unit.parts
        for held in [tuple(halves[unit.label_of(part)].values())]
    )
    return Parts(parts=parts, rotating=rotating, replicated=norms, state=state)
