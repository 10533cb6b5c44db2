"""Mutations of the product that each remove one wait or one `after` of a job."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from paro.collectives.native import NativeCollectives
from paro.collectives.pipelined import PipelinedCollectives
from paro.rotation.rotating_unit import RotatingUnit
from paro.sharding.distributed_model import DistributedModel
from paro.sharding.sharded_unit import ShardedUnit
from paro.sharding.shards import UnitShards

HO_RING = "--paro-collective ho-ring"
ROTATE = "--paro-materialize rotate"
IN_PLACE = f"{ROTATE} --paro-rotate-in-place"
FULL = "--recompute-granularity full"


@dataclass(frozen=True, slots=True)
class Mutation:
    """A text in a method's source, what replaces it, and a run that must then go wrong."""

    owner: type
    method: str
    old: str
    new: str
    strategy: str
    more: str = ""
    world_size: int = 4
    group_size: int = 2

    @property
    def name(self) -> str:
        return f"{self.owner.__name__}.{self.method}: {self.old} -> {self.new or 'nothing'}"

    @contextmanager
    def applied(self) -> Iterator[None]:
        source = textwrap.dedent(inspect.getsource(getattr(self.owner, self.method)))
        assert source.count(self.old) == 1, f"{self.name}: found {source.count(self.old)} times"
        scope: dict[str, Any] = dict(vars(sys.modules[self.owner.__module__]))
        exec(source.replace(self.old, self.new), scope)
        with patch.object(self.owner, self.method, scope[self.method]):
            yield


_UPDATED = "self.context.exposure.wait(WaitKind.GATHER_UPDATED, self._updated)"
_GATHERED = "self.context.exposure.wait(WaitKind.GATHER, self._gathered)"
_REDUCED = "self.context.exposure.wait(WaitKind.REDUCE, self._reduced)"
_READ = "self.context.exposure.wait(WaitKind.REDUCE, self._grad_U_read)"
_ARRIVED = "self.context.exposure.wait(WaitKind.GATHER, self._arrived)"
_GRADS = "self.context.exposure.wait(WaitKind.REDUCE, self._grads_arrived)"

MUTATIONS = (
    Mutation(ShardedUnit, "gather", "after=self._updated", "after=None", "IIG"),
    Mutation(ShardedUnit, "use", _GATHERED, "pass", "IIG"),
    Mutation(ShardedUnit, "use", "self.wait_for_updated_params()", "pass", "NIG"),
    Mutation(UnitShards, "wait_for_updated_params", _UPDATED, "pass", "NIG"),
    Mutation(ShardedUnit, "free_whole_grad", _READ, "pass", "IIG"),
    Mutation(UnitShards, "wait_reduced", _REDUCED, "pass", "IIG"),
    Mutation(DistributedModel, "finish_gradients", "unit.wait_reduced()", "pass", "IIG"),
    Mutation(
        UnitShards,
        "_sum_over_world",
        "comm_plan.step_reduce, comm_dtype, after=event",
        "comm_plan.step_reduce, comm_dtype",
        "IIG",
    ),
    Mutation(
        UnitShards,
        "_sum_over_world",
        "comm_plan.replicas, comm_dtype, after=event",
        "comm_plan.replicas, comm_dtype",
        "NNI",
    ),
    Mutation(
        NativeCollectives,
        "all_gather",
        "self._gather_job(part, run[depth], own), event",
        "self._gather_job(part, run[depth], own), DONE",
        "GGG",
    ),
    Mutation(
        NativeCollectives,
        "reduce_scatter",
        "self._scatter_job(part, axis, comm_dtype), event",
        "self._scatter_job(part, axis, comm_dtype), DONE",
        "GGG",
    ),
    Mutation(
        NativeCollectives,
        "all_reduce",
        "part, comm_dtype),\n        event,",
        "part, comm_dtype),\n        DONE,",
        "NNN",
    ),
    Mutation(NativeCollectives, "all_reduce", "job, event)", "job, DONE)", "NNN"),
    Mutation(
        PipelinedCollectives,
        "_submit",
        "ready = ends[stage.after]",
        "ready = DONE",
        "GGG",
        HO_RING,
    ),
    Mutation(
        PipelinedCollectives,
        "_submit",
        "[*first, buffers.left[slot]]",
        "[*first]",
        "GGG",
        HO_RING,
    ),
    Mutation(
        PipelinedCollectives,
        "_submit",
        "(after or DONE,)",
        "(DONE,)",
        "1,2,8",
        HO_RING,
        world_size=8,
        group_size=4,
    ),
    Mutation(RotatingUnit, "begin", "self.wait_for_updated_params()", "pass", "IIG", ROTATE),
    Mutation(RotatingUnit, "arrive", _ARRIVED, "pass", "IIG", ROTATE),
    Mutation(RotatingUnit, "return_to", _ARRIVED, "pass", "IIG", ROTATE),
    Mutation(RotatingUnit, "_meet_gradients", _GRADS, "pass", "IIG", ROTATE),
    Mutation(
        RotatingUnit, "_shift_in_place", "exposure.wait(kind, moved)", "pass", "IIG", IN_PLACE
    ),
    Mutation(
        RotatingUnit,
        "depart",
        "self.context.exposure.wait(WaitKind.GATHER, moved)",
        "pass",
        "IIG",
        f"{IN_PLACE} {FULL}",
    ),
)
