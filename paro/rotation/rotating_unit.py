"""The slice buffers of one rotating unit, and the ring shifts of its weights and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from torch import Tensor

from model.matmul import store_grad
from paro.collectives.shifts import Ring, Turn, scratch_numel
from paro.distributed.comm_stream import DONE, Event
from paro.distributed.exposed_time import WaitKind
from paro.layout import UnitLayout
from paro.sharding.buffers import ElasticBuffer
from paro.sharding.shards import ShardingContext, UnitShards
from paro.step.actions import Move, SliceMove, Verb
from paro.step.rotating import RingShape, SlicePolicy, Slot


class RotatingUnit(UnitShards):
    """One slice of either the trainable or the frozen matrices of a part of the model.

    Forward: `begin_forward`, then for every step `before_forward` and `after_forward`, then
    `end_forward`. Backward, from the last step to the first: `before_backward`, then `grad_box` and
    `arrived` for every gradient, then `after_backward`. What they do is up to `SlicePolicy`.
    `record`, if it is a list, gets every action that is carried out, with this unit's `number`.
    """

    def __init__(
        self,
        name: str,
        layout: UnitLayout,
        context: ShardingContext,
        ring: Ring,
        *,
        trainable: bool,
        in_place: bool,
    ) -> None:
        super().__init__(name, layout, context, trainable=trainable)
        self._ring = ring
        self.num_steps = ring.size
        numel = layout.numel // ring.size
        self._pieces = [
            tuple(layout.pieces(index * numel, (index + 1) * numel)) for index in range(ring.size)
        ]
        self._gaps = [
            [
                (low - index * numel, high - index * numel)
                for low, high in layout.gaps(index * numel, (index + 1) * numel)
            ]
            for index in range(ring.size)
        ]
        self._spares = self._make_spares(numel)
        self._slots = {slot: spare.values for slot, spare in self._spares.items()}
        self._slots[Slot.SHARD] = self.param_shard
        self._grad_boxes: dict[int, dict[str, Tensor]] = {}  # by step: views of GRAD or GRAD_2
        self._policy = SlicePolicy(
            RingShape(
                num_steps=ring.size,
                in_place=in_place,
                shares_scratch=self.param_shard.dtype == context.reduce_dtype,
            ),
            trainable=trainable,
        )
        self.number = 0
        self.record: list[Move] | None = None
        self._arrived: Event = DONE
        self._grads_arrived: Event = DONE
        self._num_received = 0  # gradients of the current backward step
        self._carried_out: dict[Verb, Callable[..., None]] = {
            Verb.WAIT: self.wait_for_updated_params,
            Verb.ALLOCATE_SLOT: lambda slot: self._spares[slot].alloc(),
            Verb.FREE_SLOT: lambda slot: self._spares[slot].free(),
            Verb.COPY: self._copy,
            Verb.SHIFT: partial(self._shift, Turn.CLOCKWISE),
            Verb.SHIFT_BACK: partial(self._shift, Turn.COUNTER_CLOCKWISE),
            Verb.WAIT_SHIFTED: self._wait_shifted,
            Verb.SHIFT_GRADS: self._shift_grads,
            Verb.WAIT_GRADS: self._wait_grads,
            Verb.ZERO_GAPS: self._zero_gaps,
            Verb.ACCUMULATE: self._accumulate,
        }

    def _make_spares(self, numel: int) -> dict[Slot, ElasticBuffer]:
        context, compute, wire = self.context, self.param_shard.dtype, self.context.reduce_dtype
        sizes = dict.fromkeys((Slot.SPARE, Slot.SPARE_2), (numel, compute))
        sizes |= dict.fromkeys((Slot.GRAD, Slot.GRAD_2), (numel, wire))
        for slot, dtype in ((Slot.SCRATCH, compute), (Slot.GRAD_SCRATCH, wire)):
            sizes[slot] = scratch_numel(numel, dtype, device_type=context.device.type), dtype
        tally, device = context.ledger.slices, context.device
        return {
            slot: ElasticBuffer(size, dtype=dtype, tally=tally, device=device)
            for slot, (size, dtype) in sizes.items()
        }

    # Forward #

    def begin_forward(self, *, shifts_back: bool) -> None:
        """Starts a forward; with `shifts_back` a backward that reads the slices follows it."""
        self._carry_out(self._policy.begin_forward(shifts_back=shifts_back))

    def before_forward(self, step: int) -> Tensor:
        """Makes this step's slice readable and returns its slot."""
        self._carry_out(self._policy.before_forward(step))
        return self._slots[self._policy.slot(step)]

    def after_forward(self, step: int) -> None:
        """Call when the computation with this step's slice is done."""
        self._carry_out(self._policy.after_forward(step))

    def end_forward(self) -> None:
        """Ends a forward."""
        self._carry_out(self._policy.end_forward())

    def boxes(self, step: int, slot: Tensor) -> dict[str, Tensor]:
        """Views of this step's slice, by parameter name; valid while the slot is allocated."""
        index = self._ring.home_of(step)
        begin = index * slot.numel()
        return {
            piece.box.name: slot[piece.offset - begin :][: piece.high - piece.low].view(
                piece.box.extent
            )
            for piece in self._pieces[index]
        }

    def starts(self, step: int) -> dict[str, tuple[int, ...]]:
        """Where the boxes of this step's slice begin in their whole parameters, by name."""
        pieces = self._pieces[self._ring.home_of(step)]
        return {piece.box.name: piece.box.start for piece in pieces}

    def first_row(self, step: int) -> int:
        """The index in the whole parameter of the first row of this step's slice."""
        return self._pieces[self._ring.home_of(step)][0].box.start[0]

    # Backward #

    def before_backward(self, step: int) -> None:
        """Makes this step's slice readable again, once its forward has been recomputed."""
        self._carry_out(self._policy.before_backward(step))

    def grad_box(self, step: int, name: str) -> tuple[Tensor, bool]:
        """The box of the sum that rotates with the slice, and whether to add to what it holds."""
        if self._num_received == 0:
            self._carry_out(self._policy.first_gradient(step))
        if step not in self._grad_boxes:
            slot = self._slots[self._policy.grad_slot(step)]
            self._grad_boxes[step] = self.boxes(step, slot)
        return self._grad_boxes[step][name], step + 1 < self.num_steps

    def arrived(self) -> None:
        """Counts a gradient of this rank that is in its box."""
        self._num_received += 1

    def has_all(self, step: int) -> bool:
        """Whether every gradient of this step's slice has been received."""
        wanted = len(self._pieces[self._ring.home_of(step)]) if self.trainable else 0
        return self._num_received == wanted

    def after_backward(self, step: int) -> None:
        """Ends the backward of this step: sends its gradients on, or stores them at step 0."""
        self._num_received = 0
        self._carry_out(self._policy.after_backward(step))

    # Actions #

    def _carry_out(self, actions: Iterable[SliceMove]) -> None:
        for action in actions:
            verb, slots = action[0], action[1:]
            self._carried_out[verb](*slots)
            if self.record is not None:
                self.record.append((verb, self.number, *slots))

    def _copy(self, source: Slot, to: Slot) -> None:
        self._slots[to].copy_(self._slots[source])

    def _shift(self, turn: Turn, source: Slot, to: Slot) -> None:
        self._arrived = self._queue(WaitKind.GATHER, turn, source, to, Slot.SCRATCH)

    def _shift_grads(self, source: Slot, to: Slot, scratch: Slot) -> None:
        turn = Turn.COUNTER_CLOCKWISE
        self._grads_arrived = self._queue(WaitKind.REDUCE, turn, source, to, scratch)

    def _queue(self, kind: WaitKind, turn: Turn, source: Slot, to: Slot, scratch: Slot) -> Event:
        values, slots = self._slots[source], self._slots
        with self.context.exposure.submitting(kind):  # without overlap the shift runs here
            if source == to:
                return self._ring.shift_in_place(values, slots[scratch], turn)
            return self._ring.shift(values, slots[to], turn)

    def _wait_shifted(self) -> None:
        self.context.exposure.wait(WaitKind.GATHER, self._arrived)
        self._arrived = DONE

    def _wait_grads(self) -> None:
        self.context.exposure.wait(WaitKind.REDUCE, self._grads_arrived)
        self._grads_arrived = DONE

    def _zero_gaps(self, slot: Slot, step: int) -> None:
        for low, high in self._gaps[self._ring.home_of(step)]:
            self._slots[slot][low:high].zero_()

    def _accumulate(self, slot: Slot) -> None:
        store_grad(self._slots[slot], self.grad_shard, adds=not self._fresh)
        self._fresh = False
