"""Decides how the slices of a rotating unit and their gradients move, event by event."""

# [Note: the slots of a slice]
# Step t of a pass computes with the slice of the rank t positions before. S is this rank's shard of
# the parameters, always allocated; E and F are spare weight slots; X and Y are the slots of
# rotating gradients.
#
# A forward that is followed by a backward shifts the slices themselves: after it the slice of the
# next rank is in S, and backward returns this rank's own, d - 1 shifts each way for d ranks.
# Autograd saves the slices as views of their slots, so backward needs each slice in the slot of its
# forward: S at the last step and every second step before it, E at the others. With an even d the
# first slice is copied from S to E, and back at the end.
#
# A forward without a backward (evaluation; blocks that will be recomputed; below the first trained
# parameter; the embedding, whose backward reads no weight) does not modify S: copies of the slices
# pass through E and F.
#
# Slots used, and memory needed in addition to S (scratch is 2 chunks, a chunk 1/4 slice or less):
#
#                    out of place                            in place
#   forward          S E (S E ..)    1 slice                 S              scratch
#   forward, copies  S E F (E F ..)  2 slices                S E (E ..)     1 slice and scratch
#   backward         E X Y           3 slices                X              1 slice and scratch
#
# Weights and gradients have separate scratch if their communication dtypes differ. In place, a unit
# holds half of every slice of its part if the slices can be halved, and the halves rotate one after
# the other: 1 slice and scratch are then less than one slice of the part.
#
# Out of place, a shift overlaps with the computation that reads the slice being sent. In backward
# the comm stream carries, in this order, the gradients that arrive with slice t and the weights of
# step t - 1; the gradients are waited for when the first gradient of step t is added to them.

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

from paro.step.actions import SliceMove, Verb


class Slot(IntEnum):
    """A buffer for a slice, or a part of one."""

    S = 0
    E = 1
    F = 2
    X = 3
    Y = 4
    SCRATCH = 5
    GRAD_SCRATCH = 6


class Journey(Enum):
    """Where the slices of a unit are."""

    HOME = "every rank's own slice is in S"
    COPYING = "copies pass through, S is not modified"
    LEAVING = "a forward shifts the slices, which a backward returns"
    AWAY = "the slice of the next rank is in S"


@dataclass(frozen=True, slots=True, kw_only=True)
class RingShape:
    """What the moves of all slices of a model depend on."""

    num_steps: int  # the ranks of the ring
    in_place: bool
    shares_scratch: bool  # weights and gradients have the same type on the wire


class SlicePolicy:
    """Answers the events of one buffer's slices with the actions to carry out, in order.

    The actions are verbs and slots, without the number of the buffer.

    Forward: `begin`, then for every step `arrive` and `depart`, then `end`. Backward, from the
    last step to the first: `return_to`, `first_gradient`, `leave`. The slot of a step may be read
    from `arrive` to `depart`, and from `return_to` to `leave`.
    """

    def __init__(self, shape: RingShape, *, trainable: bool) -> None:
        self._num_steps = shape.num_steps
        self._in_place = shape.in_place
        self._trainable = trainable
        self._grad_scratch = Slot.SCRATCH if shape.shares_scratch else Slot.GRAD_SCRATCH
        self._journey = Journey.HOME
        self._returning_to: int | None = None  # the step whose weights are shifted back
        self._alive: set[Slot] = set()

    # Forward #

    def begin(self, *, moves_home: bool) -> list[SliceMove]:
        """Starts a forward; with `moves_home` a backward that reads the slices follows it."""
        assert self._journey is not Journey.AWAY, "the slices have not come home"
        self._journey = Journey.LEAVING if moves_home else Journey.COPYING
        actions: list[SliceMove] = [(Verb.WAIT,)]
        if self._in_place:
            return actions + self._allocate(Slot.SCRATCH, *(() if moves_home else (Slot.E,)))
        needs_two = not moves_home and self._num_steps > 2
        actions += self._allocate(Slot.E, *((Slot.F,) if needs_two else ()))
        if self.slot(0) is Slot.E:
            actions.append((Verb.COPY, Slot.S, Slot.E))
        return actions

    def arrive(self, step: int) -> list[SliceMove]:
        """Before the computation with a step's slice; out of place, the next shift starts."""
        actions: list[SliceMove] = [(Verb.WAIT_SHIFTED,)] if self._waits(step) else []
        last = step + 1 == self._num_steps
        if self._journey is Journey.LEAVING and last:
            self._journey = Journey.AWAY
        if not self._in_place and not last:
            actions.append((Verb.SHIFT, self.slot(step), self.slot(step + 1)))
        return actions

    def depart(self, step: int) -> list[SliceMove]:
        """After the computation with a step's slice; in place, the slices are shifted."""
        if not self._in_place or step + 1 == self._num_steps:
            return []
        shift = (Verb.SHIFT, self.slot(step), self.slot(step + 1))
        return [shift, (Verb.WAIT_SHIFTED,)]

    def end(self) -> list[SliceMove]:
        """Ends a forward."""
        if self._journey is Journey.COPYING:
            self._journey = Journey.HOME
        return self._free(Slot.E, Slot.F, Slot.SCRATCH)

    def slot(self, step: int) -> Slot:
        """Where the slice of a step is."""
        if self._journey in (Journey.LEAVING, Journey.AWAY):
            at_home = self._in_place or (self._num_steps - 1 - step) % 2 == 0
            return Slot.S if at_home else Slot.E
        if step == 0:
            return Slot.S
        return Slot.E if self._in_place or step % 2 else Slot.F

    def _waits(self, step: int) -> bool:
        return step > 0 and not self._in_place

    # Backward #

    def return_to(self, step: int) -> list[SliceMove]:
        """Before the backward of a step; out of place, the shift of the previous step's starts.

        Nothing is done while the forward has not been recomputed yet.
        """
        if self._journey is not Journey.AWAY or self._returning_to == step:
            return []
        actions: list[SliceMove] = []
        if step + 1 == self._num_steps:
            # Alive if a recomputed forward stopped early.
            actions += self._allocate(Slot.SCRATCH if self._in_place else Slot.E)
        elif not self._in_place:
            actions.append((Verb.WAIT_SHIFTED,))
        self._returning_to = step
        if not self._in_place and step:
            actions.append((Verb.SHIFT_BACK, self.slot(step), self.slot(step - 1)))
        return actions

    def first_gradient(self, step: int) -> list[SliceMove]:
        """Before the first gradient of a step is added to the sum that rotates with its slice."""
        if step + 1 < self._num_steps:
            return [] if self._in_place else [(Verb.WAIT_GRADS,)]
        second = self._grad_scratch if self._in_place else Slot.Y
        return [*self._allocate(Slot.X, second), (Verb.ZERO_GAPS, Slot.X, step)]

    def leave(self, step: int) -> list[SliceMove]:
        """After the backward of a step: its gradients move on, or are accumulated at step 0."""
        actions = self.return_to(step)  # if no gradient of this step has called it
        if step == 0:
            return actions + self._settle()
        away = self._journey is Journey.AWAY
        if self._in_place and away:
            actions += [(Verb.SHIFT_BACK, Slot.S, Slot.S)]
            actions += [(Verb.WAIT_SHIFTED,)]
        if self._trainable:
            slots = self.grad_slot(step), self.grad_slot(step - 1)
            actions.append((Verb.SHIFT_GRADS, *slots, self._grad_scratch))
            if self._in_place:
                actions.append((Verb.WAIT_GRADS,))
        return actions

    def grad_slot(self, step: int) -> Slot:
        """Where the sum of a step's gradients is."""
        in_x = self._in_place or (self._num_steps - 1 - step) % 2 == 0
        return Slot.X if in_x else Slot.Y

    def _settle(self) -> list[SliceMove]:
        actions: list[SliceMove] = []
        if self._journey is Journey.AWAY:
            if self.slot(0) is Slot.E:
                actions.append((Verb.COPY, Slot.E, Slot.S))
            actions += self._free(Slot.E, Slot.SCRATCH)
            self._journey, self._returning_to = Journey.HOME, None
        if self._trainable:
            actions.append((Verb.ACCUMULATE, self.grad_slot(0)))
            actions += self._free(Slot.X, Slot.Y, self._grad_scratch)
        return actions

    # Memory #

    def _allocate(self, *slots: Slot) -> list[SliceMove]:
        new = [slot for slot in slots if slot not in self._alive]
        self._alive.update(new)
        return [(Verb.ALLOCATE_SLOT, slot) for slot in new]

    def _free(self, *slots: Slot) -> list[SliceMove]:
        old = [slot for slot in slots if slot in self._alive]
        self._alive.difference_update(old)
        return [(Verb.FREE_SLOT, slot) for slot in old]
