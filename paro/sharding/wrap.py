"""Binds a model's parameters to the flat buffers of its sharded units."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from paro.sharding.sharded_unit import ShardedUnit
from paro.sharding.shards import ShardingContext, param_dtype
from paro.step.units import UnitSize, buffers_of


def make_sharded_units(
    model: nn.Module, units: Sequence[UnitSize], context: ShardingContext
) -> list[ShardedUnit]:
    """The buffers of the units of a model built on the meta device, with its parameters in them.

    Parameters keep their names and `requires_grad`; only the shards are allocated.
    """
    bound = bind_empty(model, units, context)
    sharded = [ShardedUnit(buffer, context) for buffer in buffers_of(units)]
    trained = [unit for unit in sharded if unit.trainable]
    for index, unit in enumerate(trained):
        if unit.spec.dealt > 1:
            unit.lead(trained[index + 1 : index + unit.spec.dealt])
    for unit in sharded:
        unit.bind(bound)
    return sharded


def bind_empty(
    model: nn.Module, units: Sequence[UnitSize], context: ShardingContext
) -> dict[str, nn.Parameter]:
    """Replaces every parameter by an empty one that units can bind; returns these by name."""
    described = {
        placed.box.name: (placed.box.shape, buffer.trains)
        for buffer in buffers_of(units)
        for placed in buffer.layout.boxes
    }
    built = {name: (tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()}
    assert built == described, f"not as described: {built.items() ^ described.items()}"
    bound: dict[str, nn.Parameter] = {}
    for name, (_, trains) in built.items():
        empty = torch.empty(0, dtype=param_dtype(context, trains), device=context.device)
        bound[name] = nn.Parameter(empty, requires_grad=trains)
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, bound[name])
    return bound
