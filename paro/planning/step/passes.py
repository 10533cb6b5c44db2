"""Lower bound of a step with gathered weights, from what each of its passes computes and sends."""

# A forward or a backward ends no sooner than its own compute, and no sooner than links and streams
# have finished what is both queued and waited for within it. The first forward is counted from the
# end of the step before, so it has the updated parameters; the last backward is counted to the end
# of the step, with every reduction.

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from paro.planning.cost_model import UnitSize
from paro.planning.step.comm_costs import CommCosts, CostKey, kind_of
from paro.step.actions import WAITED_BY, Action, Move, StepShape, Verb
from paro.step.plan import Pass, StepPlan, step_plan

_USES = {  # attributes of UnitCommCosts
    Verb.GATHER: ("gather",),
    Verb.REDUCE: ("reduce",),
    Verb.STEP_REDUCE: ("step_reduce", "replicas"),
    Verb.GATHER_UPDATED: ("gather_updated",),
}


_Counts = Counter[tuple[str, CostKey, int]]  # of a collective, by its unit's kind and buffer


@dataclass(frozen=True, kw_only=True)
class PassCounts:
    """The collectives that are queued and waited for within a pass."""

    shape: StepShape
    units: tuple[UnitSize, ...]

    @cached_property
    def first_forward(self) -> _Counts:
        plan = self._plan
        return self._within(plan.update, plan.micro_batches[0][0])

    @cached_property
    def forward(self) -> _Counts:
        return self._within(self._plan.micro_batches[1][0])

    @cached_property
    def backward(self) -> _Counts:
        return self._within(self._plan.micro_batches[1][1])

    @cached_property
    def last_backward(self) -> _Counts:
        plan = self._plan
        return self._within(plan.micro_batches[-1][1], plan.end)

    @property
    def _plan(self) -> StepPlan:
        return step_plan(self.shape, 3)

    def _within(self, *passes: Pass) -> _Counts:
        kinds = [(kind_of(u), place) for u in self.units for place in range(len(u.kind.trains))]
        waited = _waited_for(chain.from_iterable(chain(*passes)))
        return Counter((use, *kinds[buffer]) for use, buffer in waited)


@dataclass(frozen=True, kw_only=True)
class PassLoads:
    """The least seconds that the collectives of each kind of pass take."""

    comm_costs: CommCosts
    counts: PassCounts

    @cached_property
    def first_forward(self) -> float:
        return self._longest(self.counts.first_forward)

    @cached_property
    def forward(self) -> float:
        return self._longest(self.counts.forward)

    @cached_property
    def backward(self) -> float:
        return self._longest(self.counts.backward)

    @cached_property
    def last_backward(self) -> float:
        return self._longest(self.counts.last_backward)

    def _longest(self, counts: _Counts) -> float:
        """The seconds of the link or stream that these collectives keep busy longest."""
        busy: defaultdict[Hashable, float] = defaultdict(float)
        for (use, kind, place), count in counts.items():
            for phase in getattr(self.comm_costs.per_kind[kind][place], use):
                for job in phase:
                    busy["intra"] += count * job.seconds * job.intra
                    busy["inter"] += count * job.seconds * job.inter
                    busy["gather" in use, job.stream] += count * job.seconds
        return max(busy.values(), default=0.0)


def _waited_for(actions: Iterable[Move]) -> Iterable[tuple[str, int]]:
    queued: Counter[Action] = Counter()
    for verb, number in (action[:2] for action in actions):
        if verb in _USES:
            queued[verb, number] += 1
        for cause in WAITED_BY.get(verb, ()):
            for use in _USES[cause] * queued.pop((cause, number), 0):
                yield use, number
