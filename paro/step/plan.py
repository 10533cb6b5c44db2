"""The list of a step's actions, from the policy and the order in which events come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from paro.step.actions import Action, StepShape, UnitKind, Verb, number_buffers
from paro.step.gathering import GatheringPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """A step from one point at which gradients are complete to the next.

    It begins with the update of what the step before has summed, and the first forward waits for
    the parameters that it sends.
    """

    update: tuple[Action, ...]
    micro_batches: tuple[tuple[tuple[Action, ...], tuple[Action, ...]], ...]  # forward, backward
    finish: tuple[Action, ...]

    def actions(self) -> Iterator[Action]:
        """All of them, in order."""
        yield from self.update
        for forward, backward in self.micro_batches:
            yield from forward
            yield from backward
        yield from self.finish


@lru_cache(maxsize=64)
def step_plan(shape: StepShape, num_micro_batches: int) -> StepPlan:
    """The actions of a step of `num_micro_batches` micro-batches."""
    policy = GatheringPolicy(shape)
    update = [
        action
        for buffer in shape.trainable
        for action in ((Verb.UPDATE, buffer), (Verb.GATHER_UPDATED, buffer))
    ]
    update += policy.begin_step(num_micro_batches)
    micro_batches = []
    for number in range(num_micro_batches):
        policy.begin_micro_batch(last=number + 1 == num_micro_batches)
        forward = tuple(_forward(policy))
        micro_batches.append((forward, tuple(_backward(policy))))
    return StepPlan(
        update=tuple(update),
        micro_batches=tuple(micro_batches),
        finish=(*policy.finish(), (Verb.NORM, 0)),
    )


def gathers_per_micro_batch(kinds: Sequence[UnitKind]) -> dict[str, int]:
    """How often each unit's parameters are gathered, by its name, if they are sharded.

    That does not depend on how many are gathered ahead: a unit that is needed again was released.
    """
    units = number_buffers(kinds)
    shape = StepShape(units=units, gathers=True, reduces=False, prefetch_units=0)
    actions = step_plan(shape, 1).actions()
    counts = Counter(buffer for verb, buffer in actions if verb is Verb.GATHER)
    return {
        kind.name: counts[(*unit.trainable, *unit.frozen)[0]]
        for kind, unit in zip(kinds, units, strict=True)
    }


def _forward(policy: GatheringPolicy) -> Iterator[Action]:
    shape = policy.shape
    for index, unit in enumerate(shape.units):
        yield from policy.before_forward(index)
        yield Verb.FORWARD, index
        if index in shape.early:
            for buffer in unit.trainable:
                yield from policy.first_gradient(buffer)
            yield Verb.LOSS, index
        follows = index >= shape.first_trained
        yield from policy.after_forward(index, backward_follows=follows)


def _backward(policy: GatheringPolicy) -> Iterator[Action]:
    shape = policy.shape
    together = {group[-1]: group for group in shape.recomputed}
    for index in reversed(range(shape.first_trained, len(shape.units))):
        trainable = shape.units[index].trainable
        yield from policy.before_backward(index)
        for other in together.get(index, ()):
            yield from policy.before_recompute(other)
            yield Verb.RECOMPUTE, other
        yield Verb.BACKWARD, index
        for buffer in trainable if index not in shape.early else ():
            yield from policy.first_gradient(buffer)
        yield Verb.GRADIENTS, index
        for buffer in trainable:
            yield from policy.last_gradient(buffer)
    yield from policy.end_backward()
