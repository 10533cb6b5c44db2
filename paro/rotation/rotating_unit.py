"""The slice buffers of one rotating unit, and the ring shifts of its weights and gradients."""

# [Note: the slots of a slice]
# Step t of a pass computes with the slice of the rank t positions before. `param_shard` is the slot
# S, always allocated; E and F are spare weight slots; X and Y are the slots of rotating gradients.
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

import torch
from torch import Tensor

from paro.distributed.comm_stream import DONE, Event
from paro.distributed.exposed_time import WaitKind
from paro.layout import UnitLayout
from paro.rotation.ring import Ring, Turn, scratch_numel
from paro.sharding.buffers import ElasticBuffer
from paro.sharding.shards import ShardingContext, UnitShards


class RotatingUnit(UnitShards):
    """One slice of either the trainable or the frozen matrices of a part of the model.

    Forward: `begin`, then for every step `arrive` and `depart`, then `end`. Backward, from the
    last step to the first: `return_to`, then `grad_box` and `arrived` for every gradient, then
    `leave`. A slot may be read from `arrive` to `depart`, and from `return_to` to `leave`.
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
        compute, wire = self.param_shard.dtype, context.reduce_dtype
        on = context.device.type
        self._E, self._F = self._spare(numel, compute), self._spare(numel, compute)
        self._X, self._Y = self._spare(numel, wire), self._spare(numel, wire)
        self._scratch = self._spare(scratch_numel(numel, compute, device_type=on), compute)
        self._grad_scratch = self._scratch  # they are exchanged one after the other
        if wire != compute:
            self._grad_scratch = self._spare(scratch_numel(numel, wire, device_type=on), wire)
        self._grad_boxes: dict[int, dict[str, Tensor]] = {}  # by step: views of X or Y
        self._moves_home = False  # forward shifts the slices themselves; backward returns them
        self._is_away = False  # S holds the slice of the next rank
        self._arrived: Event = DONE
        self._grads_arrived: Event = DONE
        self._leaving_for: int | None = None  # the step whose weights are being shifted back
        self._num_received = 0  # gradients of the current backward step

    def _spare(self, numel: int, dtype: torch.dtype) -> ElasticBuffer:
        context = self.context
        tally = context.ledger.slices
        return ElasticBuffer(numel, dtype=dtype, tally=tally, device=context.device)

    def _shift(self, kind: WaitKind, outgoing: Tensor, incoming: Tensor, turn: Turn) -> Event:
        with self.context.exposure.submitting(kind):  # without overlap the shift runs here
            return self._ring.shift(outgoing, incoming, turn)

    def _shift_in_place(
        self, kind: WaitKind, values: Tensor, scratch: ElasticBuffer, turn: Turn
    ) -> None:
        exposure = self.context.exposure
        with exposure.submitting(kind):
            moved = self._ring.shift_in_place(values, scratch.values, turn)
        exposure.wait(kind, moved)

    # Forward #

    def begin(self, *, moves_home: bool) -> None:
        """Starts a forward; with `moves_home` a backward that reads the slices follows it."""
        assert not self._is_away, f"{self.name} has not come home"
        self.wait_for_updated_params()
        self._moves_home = moves_home
        self._arrived = DONE
        if self._in_place:
            self._scratch.alloc()
            if not moves_home:
                self._E.alloc()
            return
        self._E.alloc()
        if not moves_home and self.num_steps > 2:
            self._F.alloc()
        if moves_home and self._slot(0) is self._E.values:
            self._E.values.copy_(self.param_shard)

    def arrive(self, step: int) -> Tensor:
        """Waits for this step's slice and returns its slot; out of place, starts the next shift."""
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
        """Call when the computation with this step's slice is done; in place, shifts the slices."""
        if not self._in_place or step + 1 == self.num_steps:
            return
        slot, next_slot = self._slot(step), self._slot(step + 1)
        if slot is next_slot:
            self._shift_in_place(WaitKind.GATHER, slot, self._scratch, Turn.CLOCKWISE)
        else:
            moved = self._shift(WaitKind.GATHER, slot, next_slot, Turn.CLOCKWISE)
            self.context.exposure.wait(WaitKind.GATHER, moved)

    def end(self) -> None:
        """Frees the spare weight slots."""
        for spare in (self._E, self._F, self._scratch):
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

    def return_to(self, step: int) -> None:
        """Waits for this step's slice; out of place, starts the shift of the previous step's.

        Does nothing while the forward has not been recomputed yet.
        """
        if not self._is_away or self._leaving_for == step - 1:
            return
        if step + 1 == self.num_steps:
            spare = self._scratch if self._in_place else self._E
            if not spare.alive:  # alive if a recomputed forward stopped early
                spare.alloc()
        self.context.exposure.wait(WaitKind.GATHER, self._arrived)
        self._arrived = DONE
        self._leaving_for = step - 1
        if not self._in_place and step:
            slot, before = self._slot(step), self._slot(step - 1)
            self._arrived = self._shift(WaitKind.GATHER, slot, before, Turn.COUNTER_CLOCKWISE)

    def grad_box(self, step: int, name: str) -> tuple[Tensor, bool]:
        """The box of the sum that rotates with the slice, and whether to add to what it holds."""
        if self._num_received == 0:
            self._meet_gradients(step, self._ring.home_of(step))
        if step not in self._grad_boxes:
            self._grad_boxes[step] = self.boxes(step, self._grad_slot(step))
        return self._grad_boxes[step][name], step + 1 < self.num_steps

    def arrived(self) -> None:
        """Counts a gradient of this rank that is in its box."""
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
        for spare in (self._X, self._grad_scratch if self._in_place else self._Y):
            if not spare.alive:
                spare.alloc()
        for low, high in self._gaps[index]:
            self._X.values[low:high].zero_()

    def _grad_slot(self, step: int) -> Tensor:
        in_x = self._in_place or (self.num_steps - 1 - step) % 2 == 0
        return self._X.values if in_x else self._Y.values

    def leave(self, step: int) -> None:
        """Ends the backward of this step: sends its gradients on, or stores them at step 0."""
        self.return_to(step)  # if no gradient of this step has called it
        self._num_received = 0
        if step == 0:
            self._settle()
            return
        turn = Turn.COUNTER_CLOCKWISE
        if self._in_place and self._is_away:
            self._shift_in_place(WaitKind.GATHER, self.param_shard, self._scratch, turn)
        if not self.trainable:
            return
        slot, before = self._grad_slot(step), self._grad_slot(step - 1)
        if self._in_place:
            self._shift_in_place(WaitKind.REDUCE, slot, self._grad_scratch, turn)
        else:
            self._grads_arrived = self._shift(WaitKind.REDUCE, slot, before, turn)

    def _settle(self) -> None:
        """Restores `param_shard`, accumulates into `grad_shard`, frees the spare slots."""
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
        for spare in (self._X, self._Y, self._grad_scratch):
            if spare.alive:
                spare.free()
