"""Lower bound of a step with gathered weights, from what each of its passes computes and sends."""

# A forward or a backward ends no sooner than its own compute, and no sooner than links and streams
# have finished what begins and ends within it: all gathers but those of the units that are live
# when it begins, all reductions but those in flight when it ends. The first forward is counted from
# the end of the step before, so it has the updated parameters and every gather; the last backward
# is counted to the end of the step, with every reduction.

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property

from paro.planning.cost_model import UnitSize
from paro.planning.step.comm_costs import CommCosts, kind_of

MAX_WHOLE_GRADS = 2  # units whose whole gradients exist at once, where reductions overlap

_Uses = tuple[str, Iterable[UnitSize]]  # an attribute of UnitCommCosts; units that use it once


@dataclass(frozen=True, kw_only=True)
class PassLoads:
    """The least seconds that the collectives of each kind of pass take."""

    comm_costs: CommCosts
    max_live: int  # units whose parameters are whole at once

    @cached_property
    def first_forward(self) -> float:
        units = self.comm_costs.units
        return self._longest(("gather", self._not_borrowed(units)), ("gather_updated", units))

    @cached_property
    def forward(self) -> float:
        late = self.comm_costs.units[self.max_live :]
        return self._longest(("gather", self._not_borrowed(late)))

    @cached_property
    def backward(self) -> float:
        early = self._trained[MAX_WHOLE_GRADS:]
        return self._longest(("gather", self._gathered_late), ("reduce", early))

    @cached_property
    def last_backward(self) -> float:
        trained = self._trained
        reductions = [(use, trained) for use in ("reduce", "step_reduce", "replicas")]
        return self._longest(("gather", self._gathered_late), *reductions)

    @property
    def _trained(self) -> list[UnitSize]:
        return [unit for unit in self.comm_costs.units if unit.trainable_numel]

    @property
    def _gathered_late(self) -> list[UnitSize]:
        """Units gathered for backward, but those that may be live when it begins."""
        units = [unit for unit in self.comm_costs.units[:-1] if unit.gathered_for_backward]
        return self._not_borrowed(units[: -self.max_live])

    def _not_borrowed(self, units: Iterable[UnitSize]) -> list[UnitSize]:
        """Without those whose weights another unit uses too: they may still be whole."""
        borrowed = {name for unit in self.comm_costs.units for name in unit.borrows}
        return [unit for unit in units if unit.name not in borrowed]

    def _longest(self, *uses: _Uses) -> float:
        """The seconds of the link or stream that these collectives keep busy longest."""
        busy: defaultdict[Hashable, float] = defaultdict(float)
        for use, units in uses:
            for kind, count in Counter(map(kind_of, units)).items():
                for part in self.comm_costs.per_kind[kind]:
                    for phase in getattr(part, use):
                        for job in phase:
                            busy["intra"] += count * job.seconds * job.intra
                            busy["inter"] += count * job.seconds * job.inter
                            busy["gather" in use, job.stream] += count * job.seconds
        return max(busy.values(), default=0.0)
