"""Lower bound of a step with gathered weights, from what each of its passes computes and sends."""

# A forward or a backward ends no sooner than its own compute, and no sooner than links and streams
# have finished what is both queued and waited for within it. The first forward is counted from the
# end of the step before, so it has the updated parameters; the last backward is counted to the end
# of the step, with every reduction.

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain

from paro.planning.step.comm_costs import CommCosts, CostKey, kind_of
from paro.step.actions import WAITED_BY, Action, StepShape, Verb
from paro.step.plan import step_plan

_Collectives = tuple[tuple[str, int], ...]  # an attribute of UnitCommCosts, the number of a buffer
_USES = {
    Verb.GATHER: ("gather",),
    Verb.REDUCE: ("reduce",),
    Verb.STEP_REDUCE: ("step_reduce", "replicas"),
    Verb.GATHER_UPDATED: ("gather_updated",),
}


@dataclass(frozen=True, kw_only=True)
class PassLoads:
    """The least seconds that the collectives of each kind of pass take."""

    comm_costs: CommCosts
    shape: StepShape

    @cached_property
    def first_forward(self) -> float:
        return self._longest(_ends_within(self.shape)[0])

    @cached_property
    def forward(self) -> float:
        return self._longest(_ends_within(self.shape)[1])

    @cached_property
    def backward(self) -> float:
        return self._longest(_ends_within(self.shape)[2])

    @cached_property
    def last_backward(self) -> float:
        return self._longest(_ends_within(self.shape)[3])

    def _longest(self, collectives: _Collectives) -> float:
        """The seconds of the link or stream that these collectives keep busy longest."""
        busy: defaultdict[Hashable, float] = defaultdict(float)
        for (use, kind, place), count in Counter(
            (use, *self._costs_of[buffer]) for use, buffer in collectives
        ).items():
            for phase in getattr(self.comm_costs.per_kind[kind][place], use):
                for job in phase:
                    busy["intra"] += count * job.seconds * job.intra
                    busy["inter"] += count * job.seconds * job.inter
                    busy["gather" in use, job.stream] += count * job.seconds
        return max(busy.values(), default=0.0)

    @cached_property
    def _costs_of(self) -> list[tuple[CostKey, int]]:
        """Of every buffer: its unit's kind, and its place among the unit's buffers."""
        kinds = map(kind_of, self.comm_costs.units)
        return [
            (kind, place) for kind in kinds for place in range(len(self.comm_costs.per_kind[kind]))
        ]


@lru_cache(maxsize=64)
def _ends_within(shape: StepShape) -> tuple[_Collectives, ...]:
    """What is queued and waited for in the first forward, later ones, a backward, the last one."""
    plan = step_plan(shape, 3)
    (first, _), (forward, backward), (_, last) = plan.micro_batches
    passes = ((*plan.update, *first), forward, backward, (*last, *plan.finish))
    return tuple(tuple(_waited_for(chain.from_iterable(stretches))) for stretches in passes)


def _waited_for(actions: Iterable[Action]) -> Iterable[tuple[str, int]]:
    queued: Counter[Action] = Counter()
    for verb, number in actions:
        if verb in _USES:
            queued[verb, number] += 1
        for cause in WAITED_BY.get(verb, ()):
            for use in _USES[cause] * queued.pop((cause, number), 0):
                yield use, number
