"""A unit whose weights circulate: receive buffers, and ring shifts of weights and gradients."""

# With --paro-materialize rotate (Rotated Tensor Parallelism) no weights are all-gathered: a rank of
# d ranks owns 1/d of every matrix, its slice, computes with one slice at a time, and sends it on:
#
#     ring step k, forward      rank r computes with the slice of rank r - k, while the shift of it
#                               to rank r + 1 is in flight
#     backward                  the other way round; the gradient of a slice moves with it, and
#                               every rank adds its own, until both are at the owner again
#
# A slot is a buffer for one slice: SHARD is the rank's own parameter shard, SPARE and SPARE_2 are
# receive buffers (double buffering), GRAD and GRAD_2 have sums of gradients. The step schedule
# (paro/step/rotating.py, slices.py) says which slots to allocate, shift and compute with, and
# calls the methods of the unit in that order.

from __future__ import annotations

from torch import Tensor

from model.matmul import store_grad
from paro.collectives.shifts import Ring, Turn
from paro.distributed.comm_stream import DONE, Event
from paro.distributed.exposed_time import WaitKind
from paro.distributed.timers import profile_range
from paro.sharding.buffers import TORCH_TYPES, ElasticBuffer
from paro.sharding.shards import ShardingContext, UnitShards
from paro.spec.sharding_spec import ShardingSpec
from paro.step.slices import Slot


class RotatingUnit(UnitShards):
    """A unit with 1/d of its trainable or of its frozen matrices on each of d ranks of a ring.

    Slices circulate by ring shifts in place of an all-gather. `param_shard` is the slice that this
    rank owns; slots are buffers for the slices of other ranks.
    """

    def __init__(self, spec: ShardingSpec, context: ShardingContext, ring: Ring) -> None:
        super().__init__(spec, context)
        self._ring = ring
        layout, numel = spec.layout, spec.layout.numel // ring.size
        ranges = [(index * numel, (index + 1) * numel) for index in range(ring.size)]
        self._ranges = [tuple(layout.chunk_ranges(*of_slice)) for of_slice in ranges]
        self._gaps = [  # the padding in each slice
            [(low - begin, high - begin) for low, high in layout.gaps(begin, end)]
            for begin, end in ranges
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
        self._views: dict[tuple[int, Slot], dict[str, Tensor]] = {}  # {(step, slot): views}
        self._weights_arrived: Event = DONE  # arrival of the slice of weights that is under way
        self._grads_arrived: Event = DONE  # arrival of the gradients that are under way

    # Slices #

    def views(self, step: int, slot: Slot) -> dict[str, Tensor]:
        """Return the parameters of the slice that is used in a ring step, by name.

        They are views of the slot, valid until the slot is freed.
        """
        if (step, slot) not in self._views:
            values, index = self._slots[slot], self._ring.owner_of(step)
            begin = index * values.numel()
            self._views[step, slot] = {
                part.chunk.name: values[part.offset - begin :][: part.high - part.low].view(
                    part.chunk.sizes
                )
                for part in self._ranges[index]
            }
        return self._views[step, slot]

    def starts(self, step: int) -> dict[str, tuple[int, ...]]:
        """Return where the slice of a ring step begins in each parameter: indices by dim."""
        parts = self._ranges[self._ring.owner_of(step)]
        return {part.chunk.name: part.chunk.offsets for part in parts}

    def grad_view(self, step: int, slot: Slot, name: str) -> tuple[Tensor, bool]:
        """Return (view of the gradient sum that rotates with a slice, whether to add to it)."""
        return self.views(step, slot)[name], step + 1 < self._ring.size

    # Actions #

    wait = UnitShards.wait_for_updated_params

    def grad_sync(self) -> None:
        with profile_range(f"reduce:{self.name}"):
            super().grad_sync()

    def allocate_slot(self, slot: Slot) -> None:
        self._spares[slot].alloc()

    def free_slot(self, slot: Slot) -> None:
        self._spares[slot].free()

    def copy(self, source: Slot, to: Slot) -> None:
        self._slots[to].copy_(self._slots[source])

    def shift(self, source: Slot, to: Slot) -> None:
        self._weights_arrived = self._shift(WaitKind.GATHER, Turn.CLOCKWISE, source, to)

    def shift_back(self, source: Slot, to: Slot) -> None:
        self._weights_arrived = self._shift(WaitKind.GATHER, Turn.COUNTER_CLOCKWISE, source, to)

    def wait_shifted(self) -> None:
        self.context.exposure.wait(WaitKind.GATHER, self._weights_arrived)
        self._weights_arrived = DONE

    def shift_grads(self, source: Slot, to: Slot, scratch: Slot) -> None:
        turn = Turn.COUNTER_CLOCKWISE
        self._grads_arrived = self._shift(WaitKind.REDUCE, turn, source, to, scratch)

    def wait_grads(self) -> None:
        self.context.exposure.wait(WaitKind.REDUCE, self._grads_arrived)
        self._grads_arrived = DONE

    def _shift(
        self, kind: WaitKind, turn: Turn, source: Slot, to: Slot, scratch: Slot = Slot.SCRATCH
    ) -> Event:
        values, slots = self._slots[source], self._slots
        with self.context.exposure.submitting(kind):  # without overlap the shift runs here
            if source == to:
                return self._ring.shift_in_place(values, slots[scratch], turn)
            return self._ring.shift(values, slots[to], turn)

    def zero_gaps(self, slot: Slot, step: int) -> None:
        for low, high in self._gaps[self._ring.owner_of(step)]:
            self._slots[slot][low:high].zero_()

    def accumulate(self, slot: Slot) -> None:
        store_grad(self._slots[slot], self.grad_shard, adds=not self._fresh)
        self._fresh = False
