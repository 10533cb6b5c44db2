"""One rotating unit's slices: their way round the ring forwards, and back with their gradients."""

# [Note: the slots of a slice]
# Step t of a pass computes with the slice of the rank t places before. `param_shard` is the slot S
# that is always there; E and F are spare slots, X and Y those of the gradients that travel.
#
# A forward that backward will follow moves the slices themselves: after it the slice of the next
# rank lies in S, and backward brings this rank's own one home, d - 1 shifts each way. Autograd
# keeps the slices as views of their slots, so backward finds each one in the slot of its forward:
# S at the last step and every second before it, E at the others. An even d copies the first slice
# from S to E, and back at the end.
#
# A forward that nothing follows (evaluation; blocks that will be computed again; below the first
# trained parameter; the embedding, whose backward reads no weight) leaves S alone, and copies of
# the slices travel through E and F.
#
#                    out of place                            in place
#   forward          S E (S E ..)  1 slice                   S              room for 2 chunks
#   forward, copies  S E F (E F ..)  2 slices                S E (E ..)     1 slice and room
#   backward         E X Y  3 slices                         X              1 slice and room
#
# (room for each where weights and gradients travel in different types; a chunk is 1/4 slice, or
# less). In place a unit holds half of every slice of its part where that has halves, which take
# their way one after the other: 1 slice and room are then less than one slice of the part.
#
# Out of place a shift runs under the computation with the slice that it takes away. In backward the
# lane carries, in this order, the gradients that come with slice t, and the weights of step t - 1:
# the former are waited for when the first gradient of step t is there to be added to them.

from __future__ import annotations

import torch
from torch import Tensor

from paro.distributed.comm_stream import DONE, Event
from paro.distributed.exposed_time import WaitKind
from paro.layout import UnitLayout
from paro.rotation.ring import Ring, Turn, room_beside
from paro.sharding.buffers import ElasticBuffer
from paro.sharding.shards import ShardingContext, UnitShards


class RotatingUnit(UnitShards):
    """The trainable, or the frozen, matrices of a part of the model, of which one slice is here.

    Forward: `begin`, then for every step `arrive` and `depart`, then `end`. Backward, from the
    last step to the first: `return_to`, `receive` for every gradient, `leave`. What lies in a slot
    may be read from `arrive` to `depart`, and from `return_to` to `leave`.
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
        self._in_place = in_place
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
        compute, wire = context.compute_dtype, context.reduce_dtype
        self._E, self._F = self._spare(numel, compute), self._spare(numel, compute)
        self._X, self._Y = self._spare(numel, wire), self._spare(numel, wire)
        self._beside = self._spare(room_beside(numel, compute), compute)
        self._beside_grads = self._beside  # they are exchanged one after the other
        if wire != compute:
            self._beside_grads = self._spare(room_beside(numel, wire), wire)
        self._grad_boxes: dict[int, dict[str, Tensor]] = {}  # by step: its place in X or Y
        self._moves_home = False  # whether this forward moves the slices, and backward brings back
        self._is_away = False  # S holds the slice of the next rank
        self._arrived: Event = DONE
        self._grads_arrived: Event = DONE
        self._leaving_for: int | None = None  # the step whose weights are on their way back
        self._num_received = 0  # gradients of this step of backward

    def _spare(self, numel: int, dtype: torch.dtype) -> ElasticBuffer:
        context = self.context
        tally = context.ledger.slices
        return ElasticBuffer(numel, dtype=dtype, tally=tally, device=context.device)

    def _shift(self, kind: WaitKind, outgoing: Tensor, incoming: Tensor, turn: Turn) -> Event:
        with self.context.exposure.submitting(kind):  # where nothing overlaps, it is carried out
            return self._ring.shift(outgoing, incoming, turn)

    def _shift_in_place(
        self, kind: WaitKind, values: Tensor, beside: ElasticBuffer, turn: Turn
    ) -> None:
        exposure = self.context.exposure
        with exposure.submitting(kind):
            moved = self._ring.shift_in_place(values, beside.values, turn)
        exposure.wait(kind, moved)

    # Forward #

    def begin(self, *, moves_home: bool) -> None:
        """Starts a forward; one with `moves_home` is followed by a backward that needs slices."""
        assert not self._is_away, f"{self.name} has not come home"
        self.wait_for_updated_params()
        self._moves_home = moves_home
        self._arrived = DONE
        if self._in_place:
            self._beside.alloc()
            if not moves_home:
                self._E.alloc()
            return
        self._E.alloc()
        if not moves_home and self.num_steps > 2:
            self._F.alloc()
        if moves_home and self._slot(0) is self._E.values:
            self._E.values.copy_(self.param_shard)

    def arrive(self, step: int) -> Tensor:
        """The slot in which this step's slice lies now."""
        self.context.exposure.wait(WaitKind.GATHER, self._arrived)
        self._arrived = DONE
        if self._moves_home and step + 1 == self.num_steps:
            self._is_away = True
        slot = self._slot(step)
        if not self._in_place and step + 1 < self.num_steps:
            next_slot = self._slot(step + 1)
            self._arrived = self._shift(WaitKind.GATHER, slot, next_slot, Turn.CLOCKWISE)
        return slot

    def depart(self, step: int) -> None:
        """The computation with this step's slice is through."""
        if not self._in_place or step + 1 == self.num_steps:
            return
        slot, next_slot = self._slot(step), self._slot(step + 1)
        if slot is next_slot:
            self._shift_in_place(WaitKind.GATHER, slot, self._beside, Turn.CLOCKWISE)
        else:
            moved = self._shift(WaitKind.GATHER, slot, next_slot, Turn.CLOCKWISE)
            self.context.exposure.wait(WaitKind.GATHER, moved)

    def end(self) -> None:
        """Gives the spare slots up."""
        for spare in (self._E, self._F, self._beside):
            if spare.alive:
                spare.free()

    def _slot(self, step: int) -> Tensor:
        if self._moves_home:
            at_home = self._in_place or (self.num_steps - 1 - step) % 2 == 0
            return self.param_shard if at_home else self._E.values
        if step == 0:
            return self.param_shard
        return self._E.values if self._in_place or step % 2 else self._F.values

    def boxes(self, step: int, slot: Tensor) -> dict[str, Tensor]:
        """Views of this step's slice, by parameter; they stay valid while the slot is alive."""
        index = self._ring.home_of(step)
        begin = index * slot.numel()
        return {
            piece.box.name: slot[piece.offset - begin :][: piece.high - piece.low].view(
                piece.box.extent
            )
            for piece in self._pieces[index]
        }

    def first_row(self, step: int) -> int:
        """The row of its parameter that this step's slice begins with."""
        return self._pieces[self._ring.home_of(step)][0].box.start[0]

    # Backward #

    def return_to(self, step: int) -> None:
        """This step's slice may be read; the one before sets out.

        Does nothing as long as the forward is still to be computed again.
        """
        if not self._is_away or self._leaving_for == step - 1:
            return
        if step + 1 == self.num_steps:
            spare = self._beside if self._in_place else self._E
            if not spare.alive:  # else its forward was computed again, and stopped short
                spare.alloc()
        self.context.exposure.wait(WaitKind.GATHER, self._arrived)
        self._arrived = DONE
        self._leaving_for = step - 1
        if not self._in_place and step:
            slot, before = self._slot(step), self._slot(step - 1)
            self._arrived = self._shift(WaitKind.GATHER, slot, before, Turn.COUNTER_CLOCKWISE)

    def receive(self, step: int, name: str, gradient: Tensor) -> None:
        """Adds this rank's gradient of a box to what the slice has brought along."""
        if self._num_received == 0:
            self._meet_gradients(step, self._ring.home_of(step))
        if step not in self._grad_boxes:
            self._grad_boxes[step] = self.boxes(step, self._grad_slot(step))
        box = self._grad_boxes[step][name]
        if step + 1 == self.num_steps:
            box.copy_(gradient)
        else:
            box.add_(gradient)
        self._num_received += 1

    def has_all(self, step: int) -> bool:
        """Whether every gradient of this step's slice has been received."""
        wanted = len(self._pieces[self._ring.home_of(step)]) if self.trainable else 0
        return self._num_received == wanted

    def _meet_gradients(self, step: int, index: int) -> None:
        if step + 1 < self.num_steps:
            self.context.exposure.wait(WaitKind.REDUCE, self._grads_arrived)
            self._grads_arrived = DONE
            return
        for spare in (self._X, self._beside_grads if self._in_place else self._Y):
            if not spare.alive:
                spare.alloc()
        for low, high in self._gaps[index]:
            self._X.values[low:high].zero_()

    def _grad_slot(self, step: int) -> Tensor:
        in_x = self._in_place or (self.num_steps - 1 - step) % 2 == 0
        return self._X.values if in_x else self._Y.values

    def leave(self, step: int) -> None:
        """The backward of this step is through: its gradients set out, or are at home."""
        self.return_to(step)  # where nothing else has said so
        self._num_received = 0
        if step == 0:
            self._settle()
            return
        turn = Turn.COUNTER_CLOCKWISE
        if self._in_place and self._is_away:
            self._shift_in_place(WaitKind.GATHER, self.param_shard, self._beside, turn)
        if not self.trainable:
            return
        slot, before = self._grad_slot(step), self._grad_slot(step - 1)
        if self._in_place:
            self._shift_in_place(WaitKind.REDUCE, slot, self._beside_grads, turn)
        else:
            self._grads_arrived = self._shift(WaitKind.REDUCE, slot, before, turn)

    def _settle(self) -> None:
        """Weights and gradients have come home."""
        if self._is_away:
            if self._slot(0) is self._E.values:
                self.param_shard.copy_(self._E.values)
            self.end()
            self._is_away, self._leaving_for = False, None
        if not self.trainable:
            return
        came_home = self._grad_slot(0)
        if self._fresh:
            self.grad_shard.copy_(came_home)
        else:
            self.grad_shard.add_(came_home)
        self._fresh = False
        for spare in (self._X, self._Y, self._beside_grads):
            if spare.alive:
                spare.free()

    def step_reduce(self) -> None:
        """Queues what is left to sum once a step, when the last gradients have come home."""
        with self.context.exposure.submitting(WaitKind.REDUCE):
            self._reduced = self._sum_over_world(DONE)
        self._fresh = True
