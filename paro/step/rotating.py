"""The policy of a step that rotates weights: which actions follow each event (hook)."""

# [Note: the life of a slice]
# A model consists of parts: embedding, attention and MLP of every block, head. The weights of a
# part are cut into d slices, one owned by each of the d ranks of a ring. Forward of a part takes d
# ring steps, each with another slice; between two steps every rank sends its slice to the next
# rank. With d = 3 rank 0 computes with slices 0 2 1, rank 1 with 1 0 2, rank 2 with 2 1 0. In
# place, slices may be cut in halves; all first halves go round the ring before the second ones.
#
# Backward takes the same steps in reverse. The sum of a slice's gradients moves with the slice,
# and every rank adds its own gradients. After step 0 slice and sum are at their owner, which
# accumulates the sum over micro-batches. After the last micro-batch the step reduce-scatter of the
# accumulated sum is queued. A tied head computes with the embedding's slices, so the sum of their
# gradients is complete only after the embedding's own backward.
#
# Parameters that are replicated on every rank (norms, adapters) do not move. Their gradients are
# reduced once all have arrived.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from paro.step.actions import Action, ActionKind, SliceAction
from paro.step.gathering import ParamAllGatherPolicy
from paro.step.slices import RingShape, SlicePolicy


class RingStep(NamedTuple):
    """The computation of a part with one slice, or with half of one."""

    part: int
    half: int
    step: int  # the number of shifts before it


@dataclass(frozen=True, slots=True, kw_only=True)
class RotatingShape:
    """A part of the model that computes with one slice of its weights after another."""

    halves: tuple[tuple[int, ...], ...]  # buffers with whole slices, or with either half of them
    backward_needs_weight: bool  # backward reads the weights


@dataclass(frozen=True, slots=True, kw_only=True)
class RotationShape:
    """The facts that decide the actions of a step where weights rotate; parts in forward order."""

    ring: RingShape
    parts: tuple[RotatingShape, ...]
    trainable: tuple[int, ...]  # buffers that train
    replicated: tuple[int, ...]  # buffers that are whole on every rank (norms)
    # Facts about the order of events, which schedule.py needs and the engine meets in its hooks:
    first_trained: int  # the first part that backward reaches; the number of parts if none
    first_replicated: int  # the first part with replicated parameters that train
    recomputed: tuple[range, ...] = ()  # indices of parts that backward recomputes together

    @property
    def needed(self) -> tuple[tuple[int, ...], ...]:
        """The buffers that each part reads; the first part also has all replicated buffers."""
        first, *others = (tuple(chain.from_iterable(part.halves)) for part in self.parts)
        return (*self.replicated, *first), *others

    @property
    def num_slices(self) -> int:
        return self.ring.num_steps

    def halves(self, index: int) -> tuple[tuple[int, ...], ...]:
        """Return the buffers of a part's slices, or of their first and their second halves."""
        return self.parts[index].halves

    def ring_steps(self, index: int) -> list[RingStep]:
        """Return the computations of a part in forward order."""
        halves, steps = range(len(self.parts[index].halves)), range(self.ring.num_steps)
        return [RingStep(index, half, step) for half in halves for step in steps]


class RotationPolicy:
    """The policy of a step that rotates weights: returns the actions to carry out at each event.

    The order of calls: `begin_step`, all micro-batches, `end_step`. A micro-batch is
    `begin_micro_batch`; `before_forward` and `after_forward` of every ring step; from the last
    ring step to the first `before_backward`, `first_gradient` and `last_gradient` of the step's
    trained buffers, `after_backward`; `end_backward`. Parts that are recomputed together run
    forward again before the gradients of the last of these parts. An evaluation is
    `begin_evaluation` and the forwards.
    """

    def __init__(self, shape: RotationShape, updated_ahead: int | None) -> None:
        self.shape = shape
        self.param_all_gathers = ParamAllGatherPolicy(shape.needed, updated_ahead)
        self._trainable = frozenset(shape.trainable)
        self.slices = {
            buffer: SlicePolicy(shape.ring, trainable=buffer in self._trainable)
            for buffer in chain.from_iterable(shape.needed)
            if buffer not in shape.replicated
        }
        # State of the current micro-batch:
        self._last = False  # whether the micro-batch is the last one of its step
        self._in_backward: RingStep | None = None
        self._missing: set[int] = set()  # buffers whose gradients have not all arrived

    # Frame #

    def begin_step(self, _num_micro_batches: int) -> list[Action]:
        return []

    def begin_micro_batch(self, *, last: bool) -> list[Action]:
        self._last = last
        self._missing.update(self._trainable.intersection(self.shape.replicated))
        return self.begin_evaluation()

    def begin_evaluation(self) -> list[Action]:
        """Begin a forward without a backward."""
        return [(ActionKind.WAIT, buffer) for buffer in self.shape.replicated]

    def end_backward(self) -> list[Action]:
        """End a micro-batch."""
        actions = self.after_backward()
        assert not self._missing, f"buffers {self._missing} received no gradient"
        return actions

    def end_step(self) -> list[Action]:
        """Wait, after the last micro-batch, until all gradients are summed over all ranks."""
        return [(ActionKind.WAIT_REDUCED, buffer) for buffer in self.shape.trainable]

    # Slices #

    def before_forward(self, at: RingStep, *, backward_follows: bool) -> list[Action]:
        """Begin a ring step; `backward_follows`: its activations are saved for a backward."""
        shifts_back = backward_follows and self.shape.parts[at.part].backward_needs_weight
        actions = self._ask(at, lambda one: one.before_forward(at.step, shifts_back=shifts_back))
        if at.half == at.step == 0:  # updates are queued behind the shift of the first slice
            actions += self.param_all_gathers.before_forward(at.part)
        return actions

    def after_forward(self, at: RingStep) -> list[Action]:
        return self._ask(at, lambda one: one.after_forward(at.step))

    def before_backward(self, at: RingStep) -> list[Action]:
        """Begin the backward of a ring step, once the gradient of one of its outputs exists."""
        if at == self._in_backward:
            return []
        actions = self.after_backward()
        self._in_backward = at
        self._missing.update(self._trainable.intersection(self._half(at)))
        return actions + self._ask(at, lambda one: one.before_backward(at.step))

    def after_backward(self) -> list[Action]:
        """End the backward of a ring step if one has begun; the next ring step calls it as well."""
        at, self._in_backward = self._in_backward, None
        if at is None:
            return []
        assert self._missing.isdisjoint(self._half(at)), f"{at}: {self._missing} are missing"
        actions: list[Action] = []
        for buffer in self._half(at):
            actions += _of(buffer, self.slices[buffer].after_backward(at.step))
            is_last = at.step == 0 and self.param_all_gathers.first_use[buffer] == at.part
            if self._last and is_last and buffer in self._trainable:
                actions.append((ActionKind.GRAD_SYNC, buffer))
        return actions

    def _ask(
        self, at: RingStep, answer: Callable[[SlicePolicy], list[SliceAction]]
    ) -> list[Action]:
        """Return the answers of the policies of the buffers with which a ring step computes."""
        return [
            action
            for buffer in self._half(at)
            for action in _of(buffer, answer(self.slices[buffer]))
        ]

    def _half(self, at: RingStep) -> tuple[int, ...]:
        """Return the buffers with which a ring step computes."""
        return self.shape.parts[at.part].halves[at.half]

    # Gradients #

    def first_gradient(self, buffer: int) -> list[Action]:
        """Prepare for the first gradient of a buffer, in a ring step if it rotates."""
        at = self._in_backward
        assert buffer in self._missing, f"a gradient of buffer {buffer} in the backward of {at}"
        if at is None or buffer in self.shape.replicated:
            return []
        return _of(buffer, self.slices[buffer].first_gradient(at.step))

    def last_gradient(self, buffer: int) -> list[Action]:
        """Note that all gradients of a buffer have arrived, in a ring step if it rotates."""
        self._missing.remove(buffer)
        if buffer not in self.shape.replicated:
            return []
        return [
            (ActionKind.REDUCE, buffer),
            *([(ActionKind.GRAD_SYNC, buffer)] if self._last else ()),
        ]


def _of(buffer: int, actions: list[SliceAction]) -> list[Action]:
    return [(action[0], buffer, *action[1:]) for action in actions]
