"""The policy of a step that gathers parameters: which actions follow each event (hook)."""

# [Note: the policy of a step]
# In: the events of a step: in training those of `DistributedModel`'s hooks (as in FSDP2), for the
# planner those that schedule.py makes up. Out: the actions to carry out at each event. For every
# micro-batch all units run forward, then backward in reverse. Backward gathers again only units
# whose backward reads weights. At most `1 + prefetch_units` units are unsharded (gathered or being
# gathered) at once, or as many as are recomputed together. In backward a unit is released when the
# gradients of its input and of all its parameters exist. Backward ends at the first unit that
# trains. At most two buffers of unsharded gradients wait to be reduced.
#
# With unsharded parameters (ZeRO-1 and 2) and several micro-batches, the fp8 casts of weights are
# cached for the whole step. Otherwise a unit caches them from its recomputation to its release.
#
# Without overlap (`prefetch_units` 0) one unit and one gradient are unsharded at a time, and the
# training thread waits for a collective at once after queueing it.

# [Note: updated parameters]
# A step ends with the update, and the next forward is the first to read the result. The all-gather
# of a unit's updated parameters is queued at once, when links have most time for it, or some units
# ahead of the unit's first use, behind the gathers queued at that point. The latter is faster where
# collectives begin in the order in which they are queued on all streams (planning/simulation.py):
# no gather waits behind a collective that only later units need. Units are gathered
# `prefetch_units` ahead, after their updated parameters, which are queued at least a unit earlier.

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from paro.step.actions import Action, ActionKind, Buckets, StepShape

MAX_WHOLE_GRADS = 2  # unsharded gradient buffers where reductions overlap with backward


class ParamAllGatherPolicy:
    """The policy of when each all-gather of updated parameters is queued.

    Each method notes an event of a step, and returns the all-gathers to queue now. `needed` has
    the buffers that each unit, or rotating part, reads, in forward order. With `ahead` None
    all-gathers are queued at once. A bucket of n buffers is queued n - 1 units further ahead, so
    that it is sent while the bucket before it computes.
    """

    def __init__(
        self, needed: Sequence[Iterable[int]], ahead: int | None, buckets: Buckets | None = None
    ) -> None:
        self.first_use: dict[int, int] = {}  # the unit of each buffer, or bucket
        for index, buffers in enumerate(needed):
            for buffer in buffers:
                self.first_use.setdefault(buffer, index)
        self._num_units = len(needed)
        self._ahead = self._num_units if ahead is None else ahead
        self._buckets = buckets or Buckets()
        for first, *others in self._buckets.buckets:
            self.first_use[first] -= len(others)
        self._updated: list[int] = []  # buffers, or buckets, whose all-gather is not queued yet

    def updated(self, buffer: int) -> list[Action]:
        """Note that the optimizer has updated a buffer; return the all-gathers to queue now."""
        self._updated += self._buckets.add(buffer)
        return self._queue(self._ahead - 1)

    def before_forward(self, index: int) -> list[Action]:
        """Queue all-gathers of updates due by a unit's forward (also of an evaluation)."""
        return self._queue(index + self._ahead)

    def flush(self) -> list[Action]:
        """Queue all remaining all-gathers, before parameters are read outside of a forward."""
        return self._queue(self._num_units)

    def _queue(self, last: int) -> list[Action]:
        """Return the all-gathers of updated buffers that the units up to `last` read."""
        due = [buffer for buffer in self._updated if self.first_use[buffer] <= last]
        if due:  # seldom, where all-gathers are queued just ahead of their use
            self._updated = [buffer for buffer in self._updated if self.first_use[buffer] > last]
        return [(ActionKind.PARAM_ALL_GATHER, buffer) for buffer in due]


class GatheringPolicy:
    """The policy of a step that gathers parameters: returns the actions to carry out at each event.

    The order of calls: `begin_step`, all micro-batches, `end_step`. A micro-batch is
    `begin_micro_batch`; `before_forward` and `after_forward` of every unit; from the last unit to
    the first that trains `before_backward`, with `before_recompute` of the units recomputed then,
    and `first_gradient` and `last_gradient` of the unit's buffers; `end_backward`. An evaluation
    is `begin_evaluation` and the forwards.
    """

    def __init__(self, shape: StepShape, updated_ahead: int | None) -> None:
        self.shape = shape
        units, first = shape.units, shape.first_trained
        self.param_all_gathers = ParamAllGatherPolicy(shape.needed, updated_ahead, Buckets(units))
        self._max_unsharded = 1 + shape.prefetch_units
        self._max_unsharded_grads = MAX_WHOLE_GRADS if shape.prefetch_units else 1
        self._needed = shape.needed
        self._in_backward = [
            unit.backward_needs_weight and index >= first for index, unit in enumerate(units)
        ]
        self._first_trained = first
        self._unit_of = {b: index for index, unit in enumerate(units) for b in unit.trainable}
        self._upcoming: deque[int] = deque()  # units still to be gathered
        self._unsharded: list[int] = []
        self._gathered: set[int] = set()  # buffers with unsharded parameters
        self._fp8_cache_stays = False  # whether fp8 casts are cached until the end of the step
        self._reducing: deque[int] = deque()  # buffers whose unsharded gradients are being reduced
        self._reduced = Buckets(units)
        # State of the current micro-batch:
        self._last = False  # whether the micro-batch is the last one of its step
        self._held = [False] * len(units)  # whether each unit stays unsharded until its backward
        self._has_input_grad = [False] * len(units)
        self._to_arrive = [0] * len(units)  # number of buffers with missing gradients by unit

    # Frame #

    def begin_step(self, num_micro_batches: int) -> list[Action]:
        """Begin a step of `num_micro_batches` micro-batches."""
        if not self.shape.gathers:  # parameters stay from update to update
            self._fp8_cache_stays = num_micro_batches > 1
            return self._fp8_cache_of_the_step(ActionKind.CACHE_FP8)
        forward = range(len(self._needed))
        backward = [index for index in reversed(forward[:-1]) if self._in_backward[index]]
        for _ in range(num_micro_batches):
            self._upcoming.extend([*forward, *backward])
        return []

    def begin_micro_batch(self, *, last: bool) -> list[Action]:
        self._last = last
        for index, unit in enumerate(self.shape.units):
            self._has_input_grad[index] = False
            self._to_arrive[index] = len(unit.trainable)
        return []

    def begin_evaluation(self) -> list[Action]:
        """Begin a forward without a backward."""
        assert not self._unsharded, f"live outside a step: {self._unsharded}"
        if self.shape.gathers:
            self._upcoming.extend(range(len(self._needed)))
        return []

    def end_backward(self) -> list[Action]:
        """End a micro-batch."""
        missing = [index for index, number in enumerate(self._to_arrive) if number]
        assert not missing, f"units {missing} received no gradient"
        held = (index for index, is_held in enumerate(self._held) if is_held)
        return [action for index in held for action in self._release(index)]

    def end_step(self) -> list[Action]:
        """Wait, after the last micro-batch, until all gradients are summed over all ranks."""
        assert not self._upcoming, f"the step has more to run: {self._upcoming}"
        assert not self._unsharded, f"live outside a step: {self._unsharded}"
        actions: list[Action] = [(ActionKind.FREE, buffer) for buffer in self._reducing]
        self._reducing.clear()
        actions += self._fp8_cache_of_the_step(ActionKind.DROP_FP8)
        return [*actions, *((ActionKind.WAIT_REDUCED, buffer) for buffer in self.shape.trainable)]

    def _fp8_cache_of_the_step(self, kind: ActionKind) -> list[Action]:
        """Return `kind` for each buffer, if fp8 casts of weights serve all micro-batches."""
        units = self.shape.units if self._fp8_cache_stays else ()
        return [(kind, buffer) for unit in units for buffer in (*unit.trainable, *unit.frozen)]

    # Parameters #

    def before_forward(self, index: int) -> list[Action]:
        return self._gather_and_wait(index, updates=self.param_all_gathers.before_forward(index))

    def after_forward(self, index: int, *, backward_follows: bool) -> list[Action]:
        """End a unit's forward; `backward_follows` says that its output needs a gradient."""
        if backward_follows and index == len(self._needed) - 1:  # its backward runs next
            self._held[index] = True
            return []
        return self._release(index)

    def before_recompute(self, index: int) -> list[Action]:
        """Prepare a unit's recomputation in backward."""
        if self._held[index]:  # its backward runs next
            return []
        self._held[index] = True
        return self._gather_and_wait(index, keeps=True)

    def before_backward(self, index: int) -> list[Action]:
        """Prepare a unit's backward, once the next unit's has made the gradient of the output."""
        actions = []
        if index + 1 < len(self._needed):
            self._has_input_grad[index + 1] = True
            actions = self._release_if_done(index + 1)
        if self._in_backward[index]:
            self._held[index] = True
            return actions + self._gather_and_wait(index, keeps=True)
        return actions + self._prefetch()

    def _gather_and_wait(
        self, index: int, *, updates: Iterable[Action] = (), keeps: bool = False
    ) -> list[Action]:
        """Make a unit's parameters readable, and gather those of later units while it runs."""
        actions = []
        if self.shape.gathers:
            if index not in self._unsharded:
                self._upcoming.remove(index)  # not always the first one when recomputing
                actions += self._gather(index)
            actions += self._prefetch()
        actions += updates
        for buffer in self._needed[index]:
            actions.append((ActionKind.WAIT, buffer))
            if keeps:  # recomputation's forward may come
                actions.append((ActionKind.CACHE_FP8, buffer))
        return actions

    def _prefetch(self) -> list[Action]:
        actions: list[Action] = []
        while self._upcoming and len(self._unsharded) < self._max_unsharded:
            index = self._upcoming[0]
            if index in self._unsharded or not self._gathered.isdisjoint(self._needed[index]):
                break
            actions += self._gather(self._upcoming.popleft())
        return actions

    def _gather(self, index: int) -> list[Action]:
        self._unsharded.append(index)
        missing = [buffer for buffer in self._needed[index] if buffer not in self._gathered]
        self._gathered.update(missing)
        return [(ActionKind.GATHER, buffer) for buffer in missing]

    def _release_if_done(self, index: int) -> list[Action]:
        has_input_grad = self._has_input_grad[index] or index <= self._first_trained
        if self._held[index] and has_input_grad and not self._to_arrive[index]:
            return self._release(index) + self._prefetch()
        return []

    def _release(self, index: int) -> list[Action]:
        drops_fp8 = self._held[index] and not self._fp8_cache_stays
        self._held[index] = False
        if not self.shape.gathers:
            return [(ActionKind.DROP_FP8, buffer) for buffer in self._needed[index] if drops_fp8]
        self._unsharded.remove(index)
        shared = {buffer for other in self._unsharded for buffer in self._needed[other]}
        unneeded = [buffer for buffer in self._needed[index] if buffer not in shared]
        self._gathered.difference_update(unneeded)
        return [(ActionKind.RELEASE, buffer) for buffer in unneeded]

    # Gradients #

    def first_gradient(self, buffer: int) -> list[Action]:
        """Prepare for the first gradient of a buffer in this micro-batch."""
        if not self.shape.reduces:
            return []
        actions: list[Action] = []
        # With few buffers, this buffer's gradients of the previous micro-batch may still be in use.
        while buffer in self._reducing or len(self._reducing) >= self._max_unsharded_grads:
            actions.append((ActionKind.FREE, self._reducing.popleft()))
        self._reducing.append(buffer)
        return [*actions, (ActionKind.ALLOCATE, buffer)]

    def last_gradient(self, buffer: int) -> list[Action]:
        """Note that all gradients of a buffer have arrived."""
        actions = [(ActionKind.REDUCE, buffer)]
        if self._last:
            actions += [(ActionKind.GRAD_SYNC, bucket) for bucket in self._reduced.add(buffer)]
        index = self._unit_of[buffer]
        self._to_arrive[index] -= 1
        return actions + self._release_if_done(index)
