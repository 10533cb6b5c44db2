"""The schedule of a step with units and buffers, and the count of every action."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TypeVar

from paro.layout import Buffer, Unit, buffers_of
from paro.machine.caching import cached_by
from paro.step.actions import WAITED_BY, Action, ActionKind, StepShape
from paro.step.rotating import RotationShape
from paro.step.schedule import LISTED_MICRO_BATCHES, StepSchedule, step_schedule

Counts = Mapping[Action, int]
T = TypeVar("T")
QUEUES = frozenset(chain.from_iterable(WAITED_BY.values()))


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """The schedule of a step and counts of its actions, summed over equal buffers."""

    shape: StepShape | RotationShape
    units: tuple[Unit, ...]
    updated_ahead: int | None = None  # units ahead of which updates are gathered; None: all at once

    @cached_property
    def buffers(self) -> list[Buffer]:
        return buffers_of(self.units)

    @cached_property
    def num_trained(self) -> int:
        return sum(unit.trainable.numel for unit in self.units)

    def buffer_of(self, action: Action) -> int:
        """Return the buffer of an action, the first one if the action computes with several."""
        kind, number, *which = action
        if kind < ActionKind.FORWARD:
            return number
        return self.shape.halves(number)[which[0] if which else 0][0]

    def schedule(self, num_micro_batches: int) -> StepSchedule:
        return step_schedule(self.shape, num_micro_batches, self.updated_ahead)

    @cached_property
    def passes(self) -> tuple[Counts, ...]:
        """The counts of actions that are both queued and waited for within a pass.

        Passes are the first forward with the update, other forwards, backwards, and the last
        backward with the end of the step.
        """
        schedule = self.schedule(LISTED_MICRO_BATCHES)
        (first, _), (forward, backward), (_, last) = schedule.micro_batches
        passes = (schedule.update, first), (forward,), (backward,), (last, schedule.end)
        return tuple(self._merged(Counter(_waited_for(*actions))) for actions in passes)

    @cached_property
    def ends(self) -> tuple[Counts, Counts]:
        """The counts of actions waited for before the first computation and after the last.

        Both are without the update.
        """
        schedule = self.schedule(1)
        ((forward, backward),) = schedule.micro_batches
        actions = [*chain.from_iterable((*forward, *backward, *schedule.end))]
        computing = [at for at, (kind, *_) in enumerate(actions) if kind >= ActionKind.FORWARD]
        begin, end = actions[: computing[0]], actions[computing[-1] :]
        return Counter(_waited_for((begin,))), Counter(_waited_for((end,)))

    @cached_by(lambda num_micro_batches: num_micro_batches)
    def of_step(self, num_micro_batches: int) -> Counts:
        """Count the actions that a step of `num_micro_batches` micro-batches queues."""
        schedule = self.schedule(min(num_micro_batches, LISTED_MICRO_BATCHES))
        counts = Counter(schedule.actions())
        more = num_micro_batches - LISTED_MICRO_BATCHES
        for action in chain.from_iterable(chain(*schedule.micro_batches[1])) if more > 0 else ():
            counts[action] += more
        queued = {action: count for action, count in counts.items() if action[0] in QUEUES}
        return self._merged(queued)

    def _merged(self, counts: Counts) -> Counts:
        by_kind: Counter[Action] = Counter()
        for (kind, number, *slots), count in counts.items():
            by_kind[kind, self.first_of_kind[number], *slots] += count
        return by_kind

    @cached_property
    def first_of_kind(self) -> list[int]:
        """The number of the first buffer of equal kind, for every buffer by number."""
        kinds = ((buffer.unit.traffic_kind, buffer.trains) for buffer in self.buffers)
        first: dict[object, int] = {}
        return [first.setdefault(kind, number) for number, kind in enumerate(kinds)]

    def by_kind(self, make: Callable[[int], T]) -> list[T]:
        """Call `make` with the number of every buffer, once for all buffers of equal kind."""
        made = {number: make(number) for number in dict.fromkeys(self.first_of_kind)}
        return [made[number] for number in self.first_of_kind]


def _waited_for(*passes: Iterable[Iterable[Action]]) -> Iterable[Action]:
    queued: dict[tuple[ActionKind, int], list[Action]] = {}
    for action in chain.from_iterable(chain(*passes)):
        kind, number = action[:2]
        if kind in QUEUES:
            queued.setdefault((kind, number), []).append(action)
        for cause in WAITED_BY.get(kind, ()):
            yield from queued.pop((cause, number), ())
