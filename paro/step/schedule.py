"""Lists the actions of a step in order, for the planner, by asking a policy at each event."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from paro.step.actions import Action, ActionKind, StepShape
from paro.step.gathering import GatheringPolicy
from paro.step.rotating import RotationPolicy, RotationShape

UnitActions = tuple[Action, ...]  # the actions at the events of one unit
Pass = tuple[UnitActions, ...]  # of a forward or backward of all units, the update or the end


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSchedule:
    """The actions of a step in order, from the optimizer's update to the next gradient norm.

    The first actions update parameters by the gradients of the previous step; then the first
    forward waits for the updated parameters.
    """

    update: Pass
    micro_batches: tuple[tuple[Pass, Pass], ...]  # forward, backward
    end: Pass

    def actions(self) -> Iterator[Action]:
        """Yield all actions in order."""
        passes = (self.update, *chain.from_iterable(self.micro_batches), self.end)
        return chain.from_iterable(chain.from_iterable(passes))


LISTED_MICRO_BATCHES = 3  # the first, one that stands for all in the middle, and the last


@lru_cache(maxsize=64)
def step_schedule(
    shape: StepShape | RotationShape, num_micro_batches: int, updated_ahead: int | None = None
) -> StepSchedule:
    """Compute the schedule of a step of `num_micro_batches` micro-batches.

    All-gathers of updated parameters are queued `updated_ahead` units ahead of their first use;
    None: at once.
    """
    policy = policy_of(shape, updated_ahead)
    update: list[UnitActions] = [
        ((ActionKind.UPDATE, buffer), *policy.param_all_gathers.updated(buffer))
        for buffer in shape.trainable
    ]
    update += [(action,) for action in policy.begin_step(num_micro_batches)]
    micro_batches = []
    for number in range(num_micro_batches):
        begin = tuple(policy.begin_micro_batch(last=number + 1 == num_micro_batches))
        units = range(len(shape.needed))
        forward = tuple(tuple(_forward(policy, index)) for index in units)
        backward = tuple(
            tuple(_backward(policy, index)) for index in reversed(units[shape.first_trained :])
        )
        micro_batches.append(((begin, *forward), (*backward, tuple(policy.end_backward()))))
    return StepSchedule(
        update=tuple(update),
        micro_batches=tuple(micro_batches),
        end=tuple((action,) for action in (*policy.end_step(), (ActionKind.NORM, 0))),
    )


def policy_of(
    shape: StepShape | RotationShape, updated_ahead: int | None
) -> GatheringPolicy | RotationPolicy:
    """Make the policy of a step: gathering, or rotation where the shape has weights rotate."""
    if isinstance(shape, RotationShape):
        return RotationPolicy(shape, updated_ahead)
    return GatheringPolicy(shape, updated_ahead)


def _forward(policy: GatheringPolicy | RotationPolicy, index: int) -> Iterator[Action]:
    if isinstance(policy, RotationPolicy):
        again = index in chain.from_iterable(policy.shape.recomputed)
        follows = index >= policy.shape.first_trained and not again
        yield from _forward_slices(policy, index, ActionKind.FORWARD, backward_follows=follows)
        return
    shape = policy.shape
    yield from policy.before_forward(index)
    yield ActionKind.FORWARD, index
    if index in shape.grads_in_forward:
        for buffer in shape.units[index].trainable:
            yield from policy.first_gradient(buffer)
        yield ActionKind.LOSS, index
    yield from policy.after_forward(index, backward_follows=index >= shape.first_trained)


def _backward(policy: GatheringPolicy | RotationPolicy, index: int) -> Iterator[Action]:
    shape = policy.shape
    together = (other for group in shape.recomputed if group[-1] == index for other in group)
    if isinstance(policy, RotationPolicy):
        yield from _backward_slices(policy, index, together)
        return
    trainable = policy.shape.units[index].trainable
    yield from policy.before_backward(index)
    for other in together:
        yield from policy.before_recompute(other)
        yield ActionKind.RECOMPUTE, other
    yield ActionKind.BACKWARD, index
    for buffer in trainable if index not in policy.shape.grads_in_forward else ():
        yield from policy.first_gradient(buffer)
    yield ActionKind.GRADIENTS, index
    for buffer in trainable:
        yield from policy.last_gradient(buffer)


def _forward_slices(
    policy: RotationPolicy,
    index: int,
    kind: ActionKind,
    *,
    backward_follows: bool,
    stops_early: bool = False,
) -> Iterator[Action]:
    """Yield a part's forward; `stops_early` once it has saved all that backward needs."""
    steps = policy.shape.ring_steps(index)
    for at in steps:
        yield from policy.before_forward(at, backward_follows=backward_follows)
        yield kind, index, at.half
        if not (stops_early and at == steps[-1]):
            yield from policy.after_forward(at)


def _backward_slices(policy: RotationPolicy, index: int, again: Iterable[int]) -> Iterator[Action]:
    shape = policy.shape
    for other in again:
        yield from _forward_slices(
            policy,
            other,
            ActionKind.RECOMPUTE,
            backward_follows=other >= shape.first_trained,
            stops_early=other == index,
        )
    for at in reversed(shape.ring_steps(index)):
        trainable = [buffer for buffer in shape.halves(index)[at.half] if buffer in shape.trainable]
        yield from policy.before_backward(at)
        yield ActionKind.BACKWARD, index, at.half
        for buffer in trainable:
            yield from policy.first_gradient(buffer)
        yield ActionKind.GRADIENTS, index, at.half
        for buffer in trainable:
            yield from policy.last_gradient(buffer)
        yield from policy.after_backward()
    for buffer in shape.replicated if index == shape.first_replicated else ():
        if buffer in shape.trainable:
            yield from policy.last_gradient(buffer)
