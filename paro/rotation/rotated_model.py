"""Runs a model whose weights rotate: each part is computed slice by slice."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from model.units import UnitSpec
from paro.collectives.shifts import Ring
from paro.distributed.timers import Timers
from paro.rotation.part import RotatingPart
from paro.rotation.rotating_unit import SLICE_ACTIONS, RotatingUnit
from paro.sharding.distributed_model import DistributedModel
from paro.sharding.sharded_unit import ShardedUnit
from paro.sharding.shards import ShardingContext, UnitShards
from paro.sharding.wrap import bind_empty
from paro.spec.sharding_spec import ShardingSpec
from paro.step.actions import Verb
from paro.step.rotating import RotationPolicy, RotationShape


class RotatedModel(DistributedModel):
    """A model of which each rank holds only slices and the replicated norms.

    A rank computes its own micro-batch with its current slice of a part and passes the slice on.
    The parts do this themselves when the model calls them; its policy decides when slices are sent
    and gradients reduced. `units` are those of `make_rotated_units`.
    """

    policy: RotationPolicy

    def __init__(
        self,
        model: nn.Module,
        unit_specs: Sequence[UnitSpec],
        units: Sequence[UnitShards],
        shape: RotationShape,
        timers: Timers,
        *,
        updated_ahead: int | None = None,
    ) -> None:
        super().__init__(model, units, timers)
        self.policy = RotationPolicy(shape, updated_ahead)
        self._carried_out |= SLICE_ACTIONS | {
            Verb.WAIT: UnitShards.wait_for_updated_params,
            Verb.REDUCE: ShardedUnit.reduce,
        }
        parts = [(spec, part) for spec in unit_specs for part in spec.parts]
        self._parts = [
            RotatingPart(index, *part, self, self.policy) for index, part in enumerate(parts)
        ]
        parameters = dict(model.named_parameters())
        for unit in self.trainable_units:
            if isinstance(unit, ShardedUnit):
                self._collect_gradients(unit, parameters, by_matmuls=False)

    def close(self) -> None:
        """Close comm streams and process groups; call it on every rank with no work in flight."""
        super().close()
        for part in self._parts:
            part.close()


def make_rotated_units(
    model: nn.Module, specs: Sequence[ShardingSpec], context: ShardingContext, ring: Ring
) -> list[UnitShards]:
    """Return the buffers of a model built on the meta device; only shards are allocated.

    Replicated parameters (norms) come first: they are updated and all-gathered first, since the
    next step needs all of them at its start.
    """
    bound = bind_empty(model, specs, context)
    norms = [ShardedUnit(spec, context) for spec in specs if spec.unit.replicated]
    for norm in norms:
        norm.bind(bound)
    weights = (spec for spec in specs if not spec.unit.replicated)
    return [*norms, *(RotatingUnit(spec, context, ring) for spec in weights)]
