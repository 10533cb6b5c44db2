"""The policy of one buffer's slices and their gradients, which move round the ring."""

# [Note: the slots of a slice]
# Step t of a pass computes with the slice of the rank t positions before this rank. A slot is a
# buffer for one slice. SHARD is this rank's shard of the parameters, always allocated; SPARE and
# SPARE_2 hold other slices of weights; GRAD and GRAD_2 hold rotating gradients.
#
# A forward that is followed by a backward overwrites SHARD: after d - 1 shifts (d ranks) it holds
# the next rank's slice, and after the d - 1 shifts of backward this rank's own again. Autograd
# saves slices as views of their slots, so backward needs each slice in the slot of its forward:
# SHARD at the last step and every second step before it, SPARE at the others. With an even d the
# first slice is copied from SHARD to SPARE, and back at the end.
#
# A forward without a backward (evaluation; blocks that will be recomputed; below the first trained
# parameter; the embedding, whose backward reads no weight) does not modify SHARD: copies of the
# slices pass through SPARE and SPARE_2.
#
# Slots used, and memory in addition to SHARD (scratch is 2 chunks, a chunk 1/4 slice or less):
#
#                    out of place                               in place
#   forward          SHARD, SPARE, SHARD ..           1 slice   SHARD         scratch
#   forward, copies  SHARD, SPARE, SPARE_2, SPARE ..  2 slices  SHARD, SPARE  1 slice and scratch
#   backward         SPARE, GRAD, GRAD_2              3 slices  GRAD          1 slice and scratch
#
# Weights and gradients have separate scratch if their communication dtypes differ. In place, a unit
# holds half of every slice of its part if the slices can be halved, and the two halves rotate one
# after the other. "1 slice and scratch" is then less than one whole slice of the part.
#
# Out of place, a shift overlaps with the computation that reads the slice being sent. In backward
# the comm stream carries the gradients that arrive with slice t, then the weights of step t - 1.
# The wait for these gradients comes when the first gradient of step t is added to them.

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

from paro.step.actions import ActionKind, SliceAction


class SliceSlot(IntEnum):
    """A buffer for a slice, or a part of one."""

    SHARD = 0
    SPARE = 1
    SPARE_2 = 2
    GRAD = 3
    GRAD_2 = 4
    SCRATCH = 5
    GRAD_SCRATCH = 6


class SliceState(Enum):
    """The slots of a unit's slices."""

    HOME = "every rank's own slice is in SHARD"
    SHIFTING = "a forward shifts the slices, which a backward returns"
    SHIFTED = "the slice of the next rank is in SHARD"


@dataclass(frozen=True, slots=True, kw_only=True)
class RingShape:
    """The facts that decide how the slices of a model move."""

    num_steps: int  # the ranks of the ring
    in_place: bool
    shares_scratch: bool  # weights and gradients have the same type on the wire


class SlicePolicy:
    """The policy of one buffer's slices: returns the actions to carry out at each event, in order.

    The actions are kinds and slots, without the number of the buffer.

    The order of calls in forward, for every ring step: `before_forward`, `after_forward`. In
    backward, from the last step to the first: `before_backward`, `first_gradient`,
    `after_backward`. The slot of a step may be read between the first and the last of these calls.
    """

    def __init__(self, shape: RingShape, *, trainable: bool) -> None:
        self._num_steps = shape.num_steps
        self._in_place = shape.in_place
        self._trainable = trainable
        self._grad_scratch = SliceSlot.SCRATCH if shape.shares_scratch else SliceSlot.GRAD_SCRATCH
        self._state = SliceState.HOME
        self._shifted_back_to: int | None = None  # the step whose weights were last shifted back
        self._allocated: set[SliceSlot] = set()

    # Forward #

    def before_forward(self, step: int, *, shifts_back: bool) -> list[SliceAction]:
        """Prepare the computation with a step's slice; out of place, start the next shift.

        With `shifts_back` a backward that reads the slices follows this forward.
        """
        actions: list[SliceAction] = []
        if step == 0:
            actions += self._begin_forward(shifts_back=shifts_back)
        elif not self._in_place:
            actions.append((ActionKind.WAIT_SHIFTED,))
        last = step + 1 == self._num_steps
        if self._state is SliceState.SHIFTING and last:
            self._state = SliceState.SHIFTED
        if not self._in_place and not last:
            actions.append((ActionKind.SHIFT, self.slot(step), self.slot(step + 1)))
        return actions

    def _begin_forward(self, *, shifts_back: bool) -> list[SliceAction]:
        assert self._state is not SliceState.SHIFTED, "the slices have not been shifted back"
        self._state = SliceState.SHIFTING if shifts_back else SliceState.HOME
        actions: list[SliceAction] = [(ActionKind.WAIT,)]
        if self._in_place:
            return actions + self._allocate(
                SliceSlot.SCRATCH, *(() if shifts_back else (SliceSlot.SPARE,))
            )
        needs_two = not shifts_back and self._num_steps > 2
        actions += self._allocate(SliceSlot.SPARE, *((SliceSlot.SPARE_2,) if needs_two else ()))
        if self.slot(0) is SliceSlot.SPARE:
            actions.append((ActionKind.COPY, SliceSlot.SHARD, SliceSlot.SPARE))
        return actions

    def after_forward(self, step: int) -> list[SliceAction]:
        """End the computation with a step's slice; in place, shift the slices."""
        if step + 1 < self._num_steps:
            shift = (ActionKind.SHIFT, self.slot(step), self.slot(step + 1))
            return [shift, (ActionKind.WAIT_SHIFTED,)] if self._in_place else []
        return self._free(SliceSlot.SPARE, SliceSlot.SPARE_2, SliceSlot.SCRATCH)

    def slot(self, step: int) -> SliceSlot:
        """Return the slot of the slice of a step, valid from `before_forward` on."""
        if self._state is not SliceState.HOME:
            at_home = self._in_place or (self._num_steps - 1 - step) % 2 == 0
            return SliceSlot.SHARD if at_home else SliceSlot.SPARE
        if step == 0:
            return SliceSlot.SHARD
        return SliceSlot.SPARE if self._in_place or step % 2 else SliceSlot.SPARE_2

    # Backward #

    def before_backward(self, step: int) -> list[SliceAction]:
        """Prepare the backward of a step; out of place, start the shift of the previous slice.

        Nothing is done while the forward has not been recomputed yet.
        """
        if self._state is not SliceState.SHIFTED or self._shifted_back_to == step:
            return []
        actions: list[SliceAction] = []
        if step + 1 == self._num_steps:
            # This slot is still allocated if a recomputed forward stopped early.
            actions += self._allocate(SliceSlot.SCRATCH if self._in_place else SliceSlot.SPARE)
        elif not self._in_place:
            actions.append((ActionKind.WAIT_SHIFTED,))
        self._shifted_back_to = step
        if not self._in_place and step:
            actions.append((ActionKind.SHIFT_BACK, self.slot(step), self.slot(step - 1)))
        return actions

    def first_gradient(self, step: int) -> list[SliceAction]:
        """Prepare the sum that rotates with a step's slice, before its first gradient is added."""
        actions = self.before_backward(step)  # not yet done if the forward was recomputed since
        if step + 1 < self._num_steps:
            return actions if self._in_place else [*actions, (ActionKind.WAIT_GRADS,)]
        second = self._grad_scratch if self._in_place else SliceSlot.GRAD_2
        actions += self._allocate(SliceSlot.GRAD, second)
        return [*actions, (ActionKind.ZERO_GAPS, SliceSlot.GRAD, step)]

    def after_backward(self, step: int) -> list[SliceAction]:
        """End the backward of a step: move its gradients on, or accumulate them at step 0."""
        actions = self.before_backward(step)  # not yet done if recomputed and nothing trains
        if step == 0:
            return actions + self._end_backward()
        if self._in_place and self._state is SliceState.SHIFTED:
            actions += [
                (ActionKind.SHIFT_BACK, SliceSlot.SHARD, SliceSlot.SHARD),
                (ActionKind.WAIT_SHIFTED,),
            ]
        if self._trainable:
            slots = self.grad_slot(step), self.grad_slot(step - 1)
            actions.append((ActionKind.SHIFT_GRADS, *slots, self._grad_scratch))
            if self._in_place:
                actions.append((ActionKind.WAIT_GRADS,))
        return actions

    def grad_slot(self, step: int) -> SliceSlot:
        """Return the slot of the sum of a step's gradients."""
        in_first = self._in_place or (self._num_steps - 1 - step) % 2 == 0
        return SliceSlot.GRAD if in_first else SliceSlot.GRAD_2

    def _end_backward(self) -> list[SliceAction]:
        actions: list[SliceAction] = []
        if self._state is SliceState.SHIFTED:
            if self.slot(0) is SliceSlot.SPARE:
                actions.append((ActionKind.COPY, SliceSlot.SPARE, SliceSlot.SHARD))
            actions += self._free(SliceSlot.SPARE, SliceSlot.SCRATCH)
            self._state, self._shifted_back_to = SliceState.HOME, None
        if self._trainable:
            actions.append((ActionKind.ACCUMULATE, self.grad_slot(0)))
            actions += self._free(SliceSlot.GRAD, SliceSlot.GRAD_2, self._grad_scratch)
        return actions

    # Memory #

    def _allocate(self, *slots: SliceSlot) -> list[SliceAction]:
        new = [slot for slot in slots if slot not in self._allocated]
        self._allocated.update(new)
        return [(ActionKind.ALLOCATE_SLOT, slot) for slot in new]

    def _free(self, *slots: SliceSlot) -> list[SliceAction]:
        old = [slot for slot in slots if slot in self._allocated]
        self._allocated.difference_update(old)
        return [(ActionKind.FREE_SLOT, slot) for slot in old]
