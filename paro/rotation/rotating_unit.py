"""The slice buffers of one rotating unit, and the ring shifts of its weights and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from torch import Tensor

from model.matmul import store_grad
from paro.collectives.shifts import Ring, Turn
from paro.distributed.comm_stream import DONE, Event
from paro.distributed.exposed_time import WaitKind
from paro.sharding.buffers import TORCH_TYPES, ElasticBuffer
from paro.sharding.shards import ShardingContext, UnitShards
from paro.spec.sharding_spec import ShardingSpec
from paro.step.actions import Move, SliceMove, Verb
from paro.step.rotating import RingShape, SlicePolicy, Slot


class RotatingUnit(UnitShards):
    """One slice of either the trainable or the frozen matrices of a part of the model.

    Its rotating part calls `carry_out` with what `policy` answers to an event, `grad_box` and
    `arrived` for every gradient of a backward step, and `after_backward` at its end. `record`, if
    it is a list, gets every action that is carried out, with this unit's `number`.
    """

    def __init__(
        self, spec: ShardingSpec, context: ShardingContext, ring: Ring, *, in_place: bool
    ) -> None:
        super().__init__(spec, context)
        self._ring = ring
        self.num_steps = ring.size
        layout, numel = spec.layout, spec.layout.numel // ring.size
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
        slots = spec.slots(context.device.type)
        shard = spec.param_numel, spec.param_dtype
        assert slots[Slot.SPARE] == shard, f"{self.name}: {slots} for slices of {shard}"
        self._spares = {
            slot: ElasticBuffer(
                size, dtype=TORCH_TYPES[kind], tally=context.ledger.slices, device=context.device
            )
            for slot, (size, kind) in slots.items()
        }
        self._slots = {slot: spare.values for slot, spare in self._spares.items()}
        self._slots[Slot.SHARD] = self.param_shard
        self._grad_boxes: dict[int, dict[str, Tensor]] = {}  # by step: views of GRAD or GRAD_2
        self.policy = SlicePolicy(
            RingShape(
                num_steps=ring.size,
                in_place=in_place,
                shares_scratch=spec.precision.compute == spec.precision.wire,
            ),
            trainable=self.trainable,
        )
        self.number = 0
        self.record: list[Move] | None = None
        self._arrived: dict[WaitKind, Event] = {}  # weights and gradients that are under way
        self._num_received = 0  # gradients of the current backward step
        self._carried_out: dict[Verb, Callable[..., None]] = {
            Verb.WAIT: self.wait_for_updated_params,
            Verb.ALLOCATE_SLOT: lambda slot: self._spares[slot].alloc(),
            Verb.FREE_SLOT: lambda slot: self._spares[slot].free(),
            Verb.COPY: self._copy,
            Verb.SHIFT: partial(self._shift, WaitKind.GATHER, Turn.CLOCKWISE),
            Verb.SHIFT_BACK: partial(self._shift, WaitKind.GATHER, Turn.COUNTER_CLOCKWISE),
            Verb.WAIT_SHIFTED: partial(self._wait, WaitKind.GATHER),
            Verb.SHIFT_GRADS: partial(self._shift, WaitKind.REDUCE, Turn.COUNTER_CLOCKWISE),
            Verb.WAIT_GRADS: partial(self._wait, WaitKind.REDUCE),
            Verb.ZERO_GAPS: self._zero_gaps,
            Verb.ACCUMULATE: self._accumulate,
        }

    # Slices #

    def slot(self, step: int) -> Tensor:
        """Where this step's slice is, from before its forward on."""
        return self._slots[self.policy.slot(step)]

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

    def grad_box(self, step: int, name: str) -> tuple[Tensor, bool]:
        """The box of the sum that rotates with the slice, and whether to add to what it holds."""
        if self._num_received == 0:
            self.carry_out(self.policy.first_gradient(step))
        if step not in self._grad_boxes:
            slot = self._slots[self.policy.grad_slot(step)]
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
        self.carry_out(self.policy.after_backward(step))

    # Actions #

    def carry_out(self, actions: Iterable[SliceMove]) -> None:
        """Does what the policy answers to an event."""
        for action in actions:
            verb, slots = action[0], action[1:]
            self._carried_out[verb](*slots)
            if self.record is not None:
                self.record.append((verb, self.number, *slots))

    def _copy(self, source: Slot, to: Slot) -> None:
        self._slots[to].copy_(self._slots[source])

    def _shift(
        self, kind: WaitKind, turn: Turn, source: Slot, to: Slot, scratch: Slot = Slot.SCRATCH
    ) -> None:
        values, slots = self._slots[source], self._slots
        with self.context.exposure.submitting(kind):  # without overlap the shift runs here
            if source == to:
                self._arrived[kind] = self._ring.shift_in_place(values, slots[scratch], turn)
            else:
                self._arrived[kind] = self._ring.shift(values, slots[to], turn)

    def _wait(self, kind: WaitKind) -> None:
        self.context.exposure.wait(kind, self._arrived.pop(kind, DONE))

    def _zero_gaps(self, slot: Slot, step: int) -> None:
        for low, high in self._gaps[self._ring.home_of(step)]:
            self._slots[slot][low:high].zero_()

    def _accumulate(self, slot: Slot) -> None:
        store_grad(self._slots[slot], self.grad_shard, adds=not self._fresh)
        self._fresh = False
