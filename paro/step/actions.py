"""The actions of a training step, and the properties of a model from which they follow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from paro.layout import Unit, buffers_of, in_buckets


class ActionKind(IntEnum):
    """A kind of action on a unit's flat buffer; the last five kinds compute with a unit.

    `UnitShards` and subclasses have a method for each kind on a buffer: `GATHER` calls `gather`.
    """

    GATHER = 0  # queues the all-gather of the buffer's parameters
    WAIT = 1  # waits until the buffer's parameters may be read
    CACHE_FP8 = 2  # lets forward and backward use one fp8 cast of the buffer's weights
    DROP_FP8 = 3  # frees the fp8 casts of the buffer's weights
    RELEASE = 4  # frees the unsharded parameters and their fp8 weight cache
    ALLOCATE = 5  # allocates the buffer's unsharded gradients
    FREE = 6  # frees the buffer's unsharded gradients, once they are reduced
    REDUCE = 7  # queues the reduction of a micro-batch's gradients, and their accumulation
    GRAD_SYNC = 8  # queues the step's reduce-scatter and replica all-reduce
    WAIT_REDUCED = 9  # waits until the buffer's gradients are summed over all ranks
    NORM = 10  # computes the norm of all gradients over all ranks
    UPDATE = 11  # updates this rank's optimizer range of the buffer
    PARAM_ALL_GATHER = 12  # queues the all-gather of the buffer's updated parameters
    # Actions on slices that rotate (slices.py); an action names the slots that it uses:
    ALLOCATE_SLOT = 13
    FREE_SLOT = 14
    COPY = 15  # copies a slice from slot to slot
    SHIFT = 16  # queues sending a slice of weights to the next rank, from slot to slot
    SHIFT_BACK = 17
    WAIT_SHIFTED = 18
    SHIFT_GRADS = 19  # queues sending a slice of gradients to the previous rank
    WAIT_GRADS = 20
    ZERO_GAPS = 21  # zeroes the padding between gradients
    ACCUMULATE = 22  # adds the complete sum of a slice's gradients to its owner's accumulator
    # Actions of a round of outer steps (paro/spec/outer_steps.py):
    OUTER_REDUCE = 23  # queues the sum over groups of how far they have moved the buffer
    OUTER_GATHER = 24  # queues the all-gather of the outer step between groups
    OUTER_SPREAD = 25  # queues the all-gather of masters inside groups
    # Actions that compute with a unit:
    FORWARD = 30
    LOSS = 31  # the rest of the head's forward, in which the loss makes gradients
    RECOMPUTE = 32  # the unit's forward again, during backward
    BACKWARD = 33  # the unit's backward up to the first gradient of a parameter
    GRADIENTS = 34  # the rest of the unit's backward


# For a wait, or a free: the actions on the same buffer whose communication it waits for.
WAITED_BY = {
    ActionKind.WAIT: (ActionKind.GATHER, ActionKind.PARAM_ALL_GATHER),
    ActionKind.FREE: (ActionKind.REDUCE,),
    ActionKind.WAIT_REDUCED: (ActionKind.REDUCE, ActionKind.GRAD_SYNC),
    ActionKind.WAIT_SHIFTED: (ActionKind.SHIFT, ActionKind.SHIFT_BACK),
    ActionKind.WAIT_GRADS: (ActionKind.SHIFT_GRADS,),
}

# For a shift: the action that sends as many bytes as a pass (all d - 1 shifts) round the ring.
PASS_OF = {
    ActionKind.SHIFT: ActionKind.GATHER,
    ActionKind.SHIFT_BACK: ActionKind.GATHER,
    ActionKind.SHIFT_GRADS: ActionKind.REDUCE,
}

# The actions of a round of outer steps, in order.
OUTER_ROUND = (ActionKind.OUTER_REDUCE, ActionKind.OUTER_GATHER, ActionKind.OUTER_SPREAD)

# A kind, the number of a buffer or a unit, and slots if weights rotate.
Action = tuple[ActionKind, int, *tuple[int, ...]]
SliceAction = tuple[ActionKind, *tuple[int, ...]]  # on a slice: a kind and slots, no buffer


@dataclass(frozen=True, slots=True)
class StepUnit:
    """A unit by the numbers of its buffers, which are numbered in forward order."""

    trainable: tuple[int, ...]
    frozen: tuple[int, ...]
    borrowed: tuple[int, ...]
    backward_needs_weight: bool
    bucket_size: int

    @property
    def needed(self) -> tuple[int, ...]:
        """The buffers whose parameters the unit reads."""
        return (*self.trainable, *self.frozen, *self.borrowed)


def number_buffers(units: Sequence[Unit]) -> tuple[StepUnit, ...]:
    """Return the units with their buffers numbered."""
    numbers: defaultdict[str, list[tuple[int, bool]]] = defaultdict(list)
    for number, buffer in enumerate(buffers_of(units)):
        numbers[buffer.unit.name].append((number, buffer.trains))
    return tuple(
        StepUnit(
            trainable=tuple(buffer for buffer, trains in numbers[unit.name] if trains),
            frozen=tuple(buffer for buffer, trains in numbers[unit.name] if not trains),
            borrowed=tuple(buffer for name in unit.borrows for buffer, _ in numbers[name]),
            backward_needs_weight=unit.backward_needs_weight,
            bucket_size=unit.bucket_size,
        )
        for unit in units
    )


class Buckets:
    """Buffers that train, grouped in buckets.

    A bucket has one step reduce-scatter and one all-gather of updated parameters.
    """

    def __init__(self, units: Iterable[StepUnit] = ()) -> None:
        self.buckets = in_buckets((unit.bucket_size, n) for unit in units for n in unit.trainable)
        self._bucket_of = {buffer: bucket for bucket in self.buckets for buffer in bucket}
        self._ready: set[int] = set()

    def of(self, buffer: int) -> tuple[int, ...]:
        """Return the bucket of a buffer; without units each buffer is one."""
        return self._bucket_of.get(buffer, (buffer,))

    def add(self, buffer: int) -> list[int]:
        """Add a buffer; return the first one of the bucket, alone, once the bucket is complete."""
        bucket = self.of(buffer)
        self._ready.add(buffer)
        if not self._ready.issuperset(bucket):
            return []
        self._ready.difference_update(bucket)
        return [bucket[0]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The facts about a model and a run that decide the actions of a step."""

    units: tuple[StepUnit, ...]
    gathers: bool  # parameters are sharded: a unit's are unsharded only while it needs them
    reduces: bool  # gradients are sharded: unsharded ones are reduced after every micro-batch
    prefetch_units: int  # units gathered ahead; 0: nothing overlaps
    # Facts about the order of events, which schedule.py needs and the engine meets in its hooks:
    recomputed: tuple[range, ...] = ()  # indices of units that backward recomputes together
    grads_in_forward: frozenset[int] = frozenset()  # units whose first gradient forward makes

    num_slices = 1  # slices of a unit's weights: a unit computes with all of its weights at once

    @property
    def needed(self) -> tuple[tuple[int, ...], ...]:
        """The buffers whose parameters each unit reads."""
        return tuple(unit.needed for unit in self.units)

    def halves(self, index: int) -> tuple[tuple[int, ...], ...]:
        """Return a unit's buffers as one entry: only slices that rotate are cut in halves."""
        return (self.units[index].needed,)

    @property
    def first_trained(self) -> int:
        """The index of the first unit that trains; the number of units if none does."""
        trained = (index for index, unit in enumerate(self.units) if unit.trainable)
        return next(trained, len(self.units))

    @property
    def trainable(self) -> tuple[int, ...]:
        """The buffers that train, in forward order."""
        return tuple(buffer for unit in self.units for buffer in unit.trainable)
