"""The list of a step's actions where weights rotate, in the order in which events come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from paro.step.actions import Move, SliceMove, StepShape, Verb
from paro.step.plan import Pass, StepPlan, UnitActions, step_plan, updates
from paro.step.rotating import RingShape, SlicePolicy
from paro.step.updating import UpdatingPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class PartShape:
    """A part of the model that computes one slice of its weights after another."""

    halves: tuple[tuple[int, ...], ...]  # buffers with whole slices, or with either half of them
    backward_needs_weight: bool  # backward reads the weights
    completes: bool  # no other part adds gradients to its buffers after it in backward


@dataclass(frozen=True, slots=True, kw_only=True)
class RotationShape:
    """What the actions of a step depend on where weights rotate; parts are in forward order."""

    ring: RingShape
    parts: tuple[PartShape, ...]
    trainable: tuple[int, ...]  # buffers
    replicated: tuple[int, ...]  # buffers that are whole on every rank (norms)
    first_trained: int  # the first part that backward reaches; the number of parts if none
    first_replicated: int  # the first part with replicated parameters that train
    recomputed: tuple[range, ...] = ()  # indices of parts that backward recomputes together

    @property
    def needed(self) -> tuple[tuple[int, ...], ...]:
        """The buffers that each part reads; a forward begins with all that are replicated."""
        first, *others = (tuple(chain.from_iterable(part.halves)) for part in self.parts)
        return (*self.replicated, *first), *others

    @property
    def num_slices(self) -> int:
        return self.ring.num_steps

    def halves(self, index: int) -> tuple[tuple[int, ...], ...]:
        """The buffers with which a part computes, those of half slices one after the other."""
        return self.parts[index].halves


def rotation_plan(
    shape: RotationShape, num_micro_batches: int, updated_ahead: int | None = None
) -> StepPlan:
    """The actions of a step of `num_micro_batches` micro-batches."""
    before, last = _micro_batches(shape)
    (waits, *parts), backward = before if num_micro_batches > 1 else last
    updating = UpdatingPolicy(shape.needed, updated_ahead)
    update = tuple(updates(shape.trainable, updating))
    forward = (_updating(updating.before_forward(n), part) for n, part in enumerate(parts))
    others = (*(before,) * (num_micro_batches - 2), last) if num_micro_batches > 1 else ()
    return StepPlan(
        update=update,
        micro_batches=(((waits, *forward), backward), *others),
        end=(*(((Verb.WAIT_REDUCED, buffer),) for buffer in shape.trainable), ((Verb.NORM, 0),)),
    )


def _updating(updates: Sequence[Move], part: UnitActions) -> UnitActions:
    """The forward of a part with all-gathers of updates behind the shift of its first slice."""
    first = next(place for place, move in enumerate(part) if move[0] is Verb.FORWARD)
    return *part[:first], *updates, *part[first:]


@lru_cache(maxsize=32)
def _micro_batches(shape: RotationShape) -> list[tuple[Pass, Pass]]:
    """A micro-batch before the last, which are alike, and the last; without updated parameters."""
    walk = _Walk(shape)
    return [
        (tuple(map(tuple, walk.forward())), tuple(map(tuple, walk.backward(last=last))))
        for last in (False, True)
    ]


def plan_of(
    shape: StepShape | RotationShape, num_micro_batches: int, updated_ahead: int | None = None
) -> StepPlan:
    """The actions of a step, whichever way parameters reach the ranks."""
    if isinstance(shape, RotationShape):
        return rotation_plan(shape, num_micro_batches, updated_ahead)
    return step_plan(shape, num_micro_batches, updated_ahead)


class _Walk:
    def __init__(self, shape: RotationShape) -> None:
        self._shape = shape
        self._num_steps = shape.ring.num_steps
        self._trainable = frozenset(shape.trainable)
        self._together = {group[-1]: group for group in shape.recomputed}
        self._again = frozenset(chain.from_iterable(shape.recomputed))
        self._policies = {
            buffer: SlicePolicy(shape.ring, trainable=buffer in self._trainable)
            for part in shape.parts
            for half in part.halves
            for buffer in half
        }

    def forward(self) -> Iterator[Iterable[Move]]:
        """The actions of every part."""
        yield ((Verb.WAIT, buffer) for buffer in self._shape.replicated)
        for index, part in enumerate(self._shape.parts):
            shifts_back = (
                part.backward_needs_weight
                and index >= self._shape.first_trained
                and index not in self._again
            )
            yield self._forward(index, Verb.FORWARD, shifts_back=shifts_back)

    def backward(self, *, last: bool) -> Iterator[Iterable[Move]]:
        """The actions of every part that backward reaches."""
        for index in reversed(range(self._shape.first_trained, len(self._shape.parts))):
            yield self._backward(index, last=last)

    def _backward(self, index: int, *, last: bool) -> Iterator[Move]:
        shape = self._shape
        for other in self._together.get(index, ()):
            shifts_back = other >= shape.first_trained
            yield from self._forward(
                other, Verb.RECOMPUTE, shifts_back=shifts_back, stops_early=other == index
            )
        for half in reversed(range(len(shape.parts[index].halves))):
            yield from self._backward_half(index, half, last=last)
        for buffer in shape.replicated if index == shape.first_replicated else ():
            if buffer in self._trainable:
                yield Verb.REDUCE, buffer
                if last:
                    yield Verb.STEP_REDUCE, buffer

    def _forward(
        self, index: int, verb: Verb, *, shifts_back: bool, stops_early: bool = False
    ) -> Iterator[Move]:
        """`stops_early`: once all is there that backward needs."""
        part = self._shape.parts[index]
        for number, half in enumerate(part.halves):
            policies = [(buffer, self._policies[buffer]) for buffer in half]
            for step in range(self._num_steps):
                for buffer, policy in policies:
                    if step == 0:
                        yield from _of(buffer, policy.begin_forward(shifts_back=shifts_back))
                    yield from _of(buffer, policy.before_forward(step))
                yield verb, index, number
                if stops_early and (number, step) == (len(part.halves) - 1, self._num_steps - 1):
                    return
                for buffer, policy in policies:
                    yield from _of(buffer, policy.after_forward(step))
                    if step + 1 == self._num_steps:
                        yield from _of(buffer, policy.end_forward())

    def _backward_half(self, index: int, number: int, *, last: bool) -> Iterator[Move]:
        part = self._shape.parts[index]
        policies = [(buffer, self._policies[buffer]) for buffer in part.halves[number]]
        for step in reversed(range(self._num_steps)):
            for buffer, policy in policies if part.backward_needs_weight else ():
                yield from _of(buffer, policy.before_backward(step))
            yield Verb.BACKWARD, index, number
            for buffer, policy in policies:
                if buffer in self._trainable:
                    yield from _of(buffer, policy.first_gradient(step))
            yield Verb.GRADIENTS, index, number
            for buffer, policy in policies:
                yield from _of(buffer, policy.after_backward(step))
                if step == 0 and last and part.completes and buffer in self._trainable:
                    yield Verb.STEP_REDUCE, buffer


def _of(buffer: int, moves: Iterable[SliceMove]) -> Iterator[Move]:
    for move in moves:
        yield move[0], buffer, *move[1:]
