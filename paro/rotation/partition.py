"""Partitions a model into parts whose weights rotate and units that are replicated (norms)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from model.units import UnitSpec
from paro.collectives.shifts import Ring
from paro.layout import halves_of, make_sliced_layout
from paro.rotation.part import Half, RotatingPart
from paro.rotation.rotating_unit import RotatingUnit
from paro.sharding import wrap
from paro.sharding.distributed_model import MicroBatchState
from paro.sharding.sharded_unit import ShardedUnit
from paro.sharding.shards import ShardingContext
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
    context: ShardingContext,
    ring: Ring,
    *,
    in_place: bool,
) -> Parts:
    """The parts of a model built on the meta device; only the shards are allocated.

    The matrices of a part are stored slice by slice in their own units. A part of a unit that
    borrows parameters, such as a tied head, uses the borrowed unit's. Other parameters are
    replicated. With `in_place` slices rotate in two halves, which halves the spare memory.
    """
    original = dict(model.named_parameters())
    bound = wrap.bind_empty(model, context)
    units: dict[str, tuple[Half, ...]] = {}  # by the label of their matrices
    state, parts = MicroBatchState(), []
    for spec in specs:
        for part in spec.parts:
            cuts, label = spec.cuts_of(part), spec.label_of(part)
            if label not in units:
                matrices = {name: original[name] for name in cuts}
                halves: tuple[int | None, ...] = (None,)
                if in_place:
                    shapes = {name: tuple(matrix.shape) for name, matrix in matrices.items()}
                    halves = halves_of(shapes, cuts=cuts, number=ring.size, shares=part.shares)
                units[label] = tuple(
                    _make_halves(label, matrices, cuts, halves, context, ring, in_place)
                )
            module = model.get_submodule(spec.name)
            parts.append(RotatingPart(module, spec, part, units[label], state))
    rotating = tuple(unit for halves in units.values() for half in halves for unit in half)
    held = {placed.box.name for unit in rotating for placed in unit.layout.boxes}
    strategy = replicated(context.strategy)
    comm_plan = make_comm_plan(strategy, context.topology)
    others = {name: p for name, p in original.items() if name not in held}
    norms = tuple(
        wrap.make_units("norms", others, replace(context, strategy=strategy, comm_plan=comm_plan))
    )
    for unit in norms:
        unit.bind(bound)
    return Parts(parts=tuple(parts), rotating=rotating, replicated=norms, state=state)


def _make_halves(
    label: str,
    matrices: Mapping[str, nn.Parameter],
    cuts: Mapping[str, int],
    halves: Sequence[int | None],
    context: ShardingContext,
    ring: Ring,
    in_place: bool,
) -> Iterator[Half]:
    """The units of a part's slices, or of their first and then their second halves."""
    for half in halves:
        units = []
        for trainable, shapes in wrap.by_training(matrices):
            layout = make_sliced_layout(
                shapes,
                cuts=cuts,
                number=ring.size,
                world_size=context.topology.world_size,
                half=half,
            )
            name = label if half is None else f"{label} {half + 1}/2"
            name = name if trainable else f"{name} (frozen)"
            units.append(
                RotatingUnit(name, layout, context, ring, trainable=trainable, in_place=in_place)
            )
        yield tuple(units)
