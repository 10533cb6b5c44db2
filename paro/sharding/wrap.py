"""Binds a model's parameters to the flat buffers of its sharded units."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from paro.sharding.buffers import TORCH_TYPES
from paro.sharding.sharded_unit import ShardedUnit
from paro.sharding.shards import ShardingContext
from paro.spec.sharding_spec import ShardingSpec


def make_sharded_units(
    model: nn.Module, specs: Sequence[ShardingSpec], context: ShardingContext
) -> list[ShardedUnit]:
    """Return the buffers of the units of a model built on the meta device, with its parameters in
    them.

    Parameters keep their names and `requires_grad`; only the shards are allocated.
    """
    bound = bind_empty(model, specs, context)
    sharded = [ShardedUnit(spec, context) for spec in specs]
    trained = [unit for unit in sharded if unit.trainable]
    for index, unit in enumerate(trained):
        if unit.spec.unit.bucket_size > 1:
            unit.form_bucket(trained[index + 1 : index + unit.spec.unit.bucket_size])
    for unit in sharded:
        unit.bind(bound)
    return sharded


def bind_empty(
    model: nn.Module, specs: Sequence[ShardingSpec], context: ShardingContext
) -> dict[str, nn.Parameter]:
    """Replace every parameter by an empty one that units can bind; returns these by name."""
    placed = [(one.chunk, spec) for spec in specs for one in spec.layout.chunks]
    described = {chunk.name: (chunk.shape, spec.buffer.trains) for chunk, spec in placed}
    built = {name: (tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()}
    assert built == described, f"not as described: {built.items() ^ described.items()}"
    bound: dict[str, nn.Parameter] = {}
    for name, spec in {chunk.name: spec for chunk, spec in placed}.items():
        empty = torch.empty(0, dtype=TORCH_TYPES[spec.param_dtype], device=context.device)
        bound[name] = nn.Parameter(empty, requires_grad=spec.buffer.trains)
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, bound[name])
    return bound
