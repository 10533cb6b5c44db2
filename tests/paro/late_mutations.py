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

MUTATIONS = (
    Mutation(ShardedUnit, "gather", "after=self._updated", "after=None", "IIG"),
    Mutation(ShardedUnit, "use", _GATHERED, "pass", "IIG"),
    Mutation(ShardedUnit, "use", "self.wait_for_updated_params()", "pass", "NIG"),
    Mutation(UnitShards, "wait_for_updated_params", _UPDATED, "pass", "NIG"),
    Mutation(ShardedUnit, "free_whole_grad", _READ, "pass", "IIG"),
    Mutation(UnitShards, "wait_reduced", _REDUCED, "pass", "IIG"),
    Mutation(DistributedModel, "finish_gradients", "unit.wait_reduced()", "pass", "IIG"),
)
