"""The list of a step's actions, from the policy and the order in which events come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from paro.step.actions import Action, Buckets, Move, StepShape, Verb
from paro.step.gathering import GatheringPolicy
from paro.step.updating import UpdatingPolicy

UnitActions = tuple[Move, ...]  # what comes with the events of one unit
Pass = tuple[UnitActions, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """A step from one point at which gradients are complete to the next.

    It begins with the update of what the step before has summed, and the first forward waits for
    the parameters that it changes.
    """

    update: Pass
    micro_batches: tuple[tuple[Pass, Pass], ...]  # forward, backward
    end: Pass

    def actions(self) -> Iterator[Move]:
        """All of them, in order."""
        passes = (self.update, *chain.from_iterable(self.micro_batches), self.end)
        return chain.from_iterable(chain.from_iterable(passes))


@lru_cache(maxsize=64)
def step_plan(
    shape: StepShape, num_micro_batches: int, updated_ahead: int | None = None
) -> StepPlan:
    """The actions of a step of `num_micro_batches` micro-batches.

    All-gathers of updated parameters are queued `updated_ahead` units ahead of their first use;
    None: at once.
    """
    needed = [unit.needed for unit in shape.units]
    updating = UpdatingPolicy(needed, updated_ahead, Buckets(shape.units))
    policy = GatheringPolicy(shape, updating)
    update: list[UnitActions] = [*updates(shape.trainable, updating)]
    update += [(action,) for action in policy.begin_step(num_micro_batches)]
    micro_batches = []
    for number in range(num_micro_batches):
        policy.begin_micro_batch(last=number + 1 == num_micro_batches)
        units = range(len(shape.units))
        forward = tuple(tuple(_forward(policy, index)) for index in units)
        backward = tuple(
            tuple(_backward(policy, index)) for index in reversed(units[shape.first_trained :])
        )
        micro_batches.append((forward, (*backward, tuple(policy.end_backward()))))
    return StepPlan(
        update=tuple(update),
        micro_batches=tuple(micro_batches),
        end=tuple((action,) for action in (*policy.end_step(), (Verb.NORM, 0))),
    )


def updates(trainable: Iterable[int], updating: UpdatingPolicy) -> Iterator[UnitActions]:
    """The update of these buffers."""
    return (((Verb.UPDATE, buffer), *updating.updated(buffer)) for buffer in trainable)


def _forward(policy: GatheringPolicy, index: int) -> Iterator[Action]:
    shape = policy.shape
    yield from policy.before_forward(index)
    yield Verb.FORWARD, index
    if index in shape.grads_in_forward:
        for buffer in shape.units[index].trainable:
            yield from policy.first_gradient(buffer)
        yield Verb.LOSS, index
    follows = index >= shape.first_trained
    yield from policy.after_forward(index, backward_follows=follows)


def _backward(policy: GatheringPolicy, index: int) -> Iterator[Action]:
    shape = policy.shape
    trainable = shape.units[index].trainable
    yield from policy.before_backward(index)
    for group in shape.recomputed:
        for other in group if group[-1] == index else ():
            yield from policy.before_recompute(other)
            yield Verb.RECOMPUTE, other
    yield Verb.BACKWARD, index
    for buffer in trainable if index not in shape.grads_in_forward else ():
        yield from policy.first_gradient(buffer)
    yield Verb.GRADIENTS, index
    for buffer in trainable:
        yield from policy.last_gradient(buffer)


LISTED_MICRO_BATCHES = 3  # the first, one in the middle, the last: those in the middle are alike
