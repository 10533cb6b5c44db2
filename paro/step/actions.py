"""The actions of a training step, and the facts that decide them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import count

from paro.layout import Unit


class Verb(IntEnum):
    """A kind of action on a buffer; the last five compute, with a unit."""

    GATHER = 0  # queues the all-gather of its whole parameters
    WAIT = 1  # until its parameters may be read
    CACHE_FP8 = 2  # forward and backward use one fp8 cast of its weights
    DROP_FP8 = 3  # frees the cached casts
    RELEASE = 4  # frees the whole parameters and their fp8 weight cache
    ALLOCATE = 5  # its whole gradients
    FREE = 6  # its whole gradients, once they are reduced
    REDUCE = 7  # queues the reduction of a micro-batch's gradients, and their accumulation
    GRAD_SYNC = 8  # queues the step's reduce-scatter and replica all-reduce
    WAIT_REDUCED = 9  # until its gradients are summed over all ranks
    NORM = 10  # of all gradients over all ranks
    UPDATE = 11  # its optimizer range
    PARAM_ALL_GATHER = 12  # queues the all-gather of its updated parameters
    # Where slices rotate (slices.py), followed by slots:
    ALLOCATE_SLOT = 13
    FREE_SLOT = 14
    COPY = 15  # a slice from slot to slot
    SHIFT = 16  # queues weights' slices one rank on, from slot to slot
    SHIFT_BACK = 17
    WAIT_SHIFTED = 18
    SHIFT_GRADS = 19  # queues gradients' slices one rank back
    WAIT_GRADS = 20
    ZERO_GAPS = 21  # the padding between gradients
    ACCUMULATE = 22  # the sum that came home
    # Computing:
    FORWARD = 30
    LOSS = 31  # the rest of a forward that makes gradients
    RECOMPUTE = 32  # a forward again, in backward
    BACKWARD = 33  # up to the unit's first gradient
    GRADIENTS = 34  # the rest of its backward


# The actions on a buffer whose communication a wait, or a free, waits for.
WAITED_BY = {
    Verb.WAIT: (Verb.GATHER, Verb.PARAM_ALL_GATHER),
    Verb.FREE: (Verb.REDUCE,),
    Verb.WAIT_REDUCED: (Verb.REDUCE, Verb.GRAD_SYNC),
    Verb.WAIT_SHIFTED: (Verb.SHIFT, Verb.SHIFT_BACK),
    Verb.WAIT_GRADS: (Verb.SHIFT_GRADS,),
}

# A shift is a step of a pass round the ring, which sends as many bytes as this action would.
PASS_OF = {Verb.SHIFT: Verb.GATHER, Verb.SHIFT_BACK: Verb.GATHER, Verb.SHIFT_GRADS: Verb.REDUCE}

Action = tuple[Verb, int]  # and the number of a buffer or a unit
SliceMove = tuple[Verb, *tuple[int, ...]]  # of a slice of some buffer, with slots
Move = tuple[Verb, int, *tuple[int, ...]]  # either, with the number


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
    numbers = count()
    own = {unit.name: [(next(numbers), trains) for trains in unit.trains] for unit in units}
    return tuple(
        StepUnit(
            trainable=tuple(buffer for buffer, trains in own[unit.name] if trains),
            frozen=tuple(buffer for buffer, trains in own[unit.name] if not trains),
            borrowed=tuple(buffer for name in unit.borrows for buffer, _ in own[name]),
            backward_needs_weight=unit.backward_needs_weight,
            bucket_size=unit.bucket_size,
        )
        for unit in units
    )


class Buckets:
    """Buffers that train, in buckets with one step reduce-scatter and one all-gather of updates.

    A unit's `bucket_size` is the number of buffers of the bucket that begins with it, 0 for others.
    """

    def __init__(self, units: Iterable[StepUnit] = ()) -> None:
        trained = [(unit.bucket_size, buffer) for unit in units for buffer in unit.trainable]
        self.buckets = [
            tuple(buffer for _, buffer in trained[index : index + size])
            for index, (size, _) in enumerate(trained)
        ]
        self._bucket_of = {buffer: bucket for bucket in self.buckets for buffer in bucket}
        self._ready: set[int] = set()

    def add(self, buffer: int) -> list[int]:
        """Return the first buffer of a bucket, which stands for it, once all buffers are added."""
        bucket = self._bucket_of.get(buffer, (buffer,))
        self._ready.add(buffer)
        if not self._ready.issuperset(bucket):
            return []
        self._ready.difference_update(bucket)
        return [bucket[0]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The inputs of a step's actions."""

    units: tuple[StepUnit, ...]
    gathers: bool  # parameters are sharded: a unit's are whole only while it needs them
    reduces: bool  # gradients are sharded: whole ones are reduced after every micro-batch
    prefetch_units: int  # units gathered ahead; 0: nothing overlaps
    # Of the canonical order of events (schedule.py), which the engine meets by itself:
    recomputed: tuple[range, ...] = ()  # indices of units that backward recomputes together
    grads_in_forward: frozenset[int] = frozenset()  # units that make their first one there

    num_slices = 1  # of everything, which is computed as a whole

    @property
    def needed(self) -> tuple[tuple[int, ...], ...]:
        """The buffers whose parameters each unit reads."""
        return tuple(unit.needed for unit in self.units)

    def halves(self, index: int) -> tuple[tuple[int, ...], ...]:
        """Return the buffers with which a unit computes."""
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
