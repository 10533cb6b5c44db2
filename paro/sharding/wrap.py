"""Wraps a model's modules as sharded units and binds its parameters to their flat buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from model.units import UnitSpec
from paro.layout import Shape, make_whole_layout
from paro.sharding.sharded_unit import ShardedUnit
from paro.sharding.shards import ShardingContext, param_dtype
from paro.step.actions import UnitKind


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitModule:
    """A wrapped module and the units with its parameters."""

    kind: UnitKind
    wrapped: nn.Module
    own: tuple[ShardedUnit, ...]  # separate units for trainable and frozen parameters


def make_unit_modules(
    model: nn.Module,
    specs: Sequence[UnitSpec],
    context: ShardingContext,
    dealt: Mapping[str, int] | None = None,
) -> list[UnitModule]:
    """The unit modules of a model built on the meta device, with parameters bound to buffers.

    Parameters keep their names and `requires_grad`; only the shards are allocated. Units are
    `dealt` in buckets (`Buckets`), or each is one.
    """
    dealt = dealt or {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    own_units: dict[str, tuple[ShardedUnit, ...]] = {}
    seen: set[str] = set()
    for spec in specs:
        parameters = {names[id(p)]: p for p in model.get_submodule(spec.name).parameters()}
        assert not seen & parameters.keys(), f"{seen & parameters.keys()} lie in two units"
        seen |= parameters.keys()
        own_units[spec.name] = tuple(make_units(spec.name, parameters, context))
    assert seen == set(names.values()), f"in no unit: {set(names.values()) - seen}"
    trained = [unit for units in own_units.values() for unit in units if unit.trainable]
    for index, unit in enumerate(trained):
        if dealt.get(unit.name, 1) > 1:
            unit.lead(trained[index + 1 : index + dealt[unit.name]])
    bound = bind_empty(model, context)
    for unit in (unit for units in own_units.values() for unit in units):
        unit.bind(bound)
    return [
        UnitModule(
            kind=UnitKind(
                name=spec.name,
                trains=tuple(unit.trainable for unit in own_units[spec.name]),
                borrows=spec.borrows,
                backward_needs_weight=spec.backward_needs_weight,
                dealt=dealt.get(spec.name, 1),
            ),
            wrapped=model.get_submodule(spec.name),
            own=own_units[spec.name],
        )
        for spec in specs
    ]


def make_units(
    name: str, parameters: Mapping[str, nn.Parameter], context: ShardingContext
) -> Iterator[ShardedUnit]:
    """The units of trainable and of frozen parameters, if there are any."""
    for trainable, shapes in by_training(parameters):
        label = name if trainable else f"{name} (frozen)"
        layout = make_whole_layout(shapes, world_size=context.topology.world_size)
        yield ShardedUnit(label, layout, context, trainable=trainable)


def by_training(
    parameters: Mapping[str, nn.Parameter],
) -> Iterator[tuple[bool, dict[str, Shape]]]:
    """The shapes of the trainable and of the frozen parameters, if there are any."""
    for trainable in (True, False):
        shapes = {n: tuple(p.shape) for n, p in parameters.items() if p.requires_grad is trainable}
        if shapes:
            yield trainable, shapes


def bind_empty(model: nn.Module, context: ShardingContext) -> dict[str, nn.Parameter]:
    """Replaces every parameter by an empty one that units can bind; returns these by name."""
    bound: dict[str, nn.Parameter] = {}
    for name, old in list(model.named_parameters()):
        dtype = param_dtype(context, old.requires_grad)
        empty = torch.empty(0, dtype=dtype, device=context.device)
        bound[name] = nn.Parameter(empty, requires_grad=old.requires_grad)
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, bound[name])
    return bound
