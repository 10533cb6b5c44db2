"""Simulated training thread of rotation/: every part slice by slice, forward and backward."""

# Out of place, the next slice arrives while the current one is used. In backward the communication
# stream sends weights and gradients in turn; CPU ranks hand messages to the backend's own threads,
# which send both at once. In place, every shift is waited for, and the received data is copied.

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Literal

from paro.planning.machine.machine import GroupSpeed
from paro.planning.step.rotating import RotatedPart, RotatingCosts
from paro.planning.step.simulation import Actor, Compute, Program, Simulation, Wait, Works
from paro.planning.step.thread import Buffer, StepThread
from paro.precision import BYTES_OF

_Payload = Literal["gather", "reduce"]  # weights, or their gradients


class RotatingThread(StepThread):
    """Computes every part with one slice after another, and sends each slice to the next rank."""

    costs: RotatingCosts

    def __init__(
        self, costs: RotatingCosts, simulation: Simulation, actor: Actor, speed: GroupSpeed
    ) -> None:
        super().__init__(costs, simulation, actor, speed)
        self.parts = costs.computing.parts
        self.first = costs.computing.first_trained_part
        self.degree = costs.computing.degree
        self.of_unit: dict[str, list[Buffer]] = {}
        for buffer in self.buffers:
            self.of_unit.setdefault(buffer.size.name, []).append(buffer)
        self.sizes = {unit.name: unit for unit in costs.comm_costs.units}
        # The part whose backward adds a unit's last gradients: a tied head uses the embedding's.
        self.lowest_user = {half: p.name for p in reversed(self.parts) for half in p.halves}
        replicated = [unit for unit in costs.comm_costs.units if unit.replicated]
        self.norms = [buffer for unit in replicated for buffer in self.of_unit[unit.name]]
        self.lowest_norm = max(1, self.first)  # the index of its part; the embedding has none
        self.num_norms = sum(unit.trainable_numel for unit in replicated)

    def program(self) -> Program:
        costs, trained = self.costs, [b for b in self.buffers if b.costs.trainable]
        yield self._compute(costs.device.step_seconds, "step", "other")
        for buffer in trained:
            yield from self._update(self.buffers.index(buffer))
            yield from self._gather_updated(self.buffers.index(buffer))
        for index in range(costs.num_micro_batches):
            yield from self._micro_batch(last=index + 1 == costs.num_micro_batches)
        for buffer in trained:
            yield from self._wait_reduced(self.buffers.index(buffer))
        yield from self._norm(0)

    def _micro_batch(self, *, last: bool) -> Program:
        for buffer in self.norms:
            yield from self._wait_for_updated(buffer)
        for part in self.parts:
            yield from self._forward_part(part, "forward", part.seconds.forward)
        for index in reversed(range(self.first, len(self.parts))):
            part = self.parts[index]
            yield from self._recompute_part(part, index)
            for half in reversed(part.halves):
                yield from self._backward_part(part, half)
                if index == self.lowest_norm and half == part.halves[0]:
                    yield from self._collect_norms(last=last)
                if last and self.lowest_user[half] == part.name:
                    yield from self._reduce_all_for_step(self.of_unit[half])

    def _collect_norms(self, *, last: bool) -> Program:
        collecting = self.costs.collect_seconds(self.num_norms)
        yield self._compute(collecting, "backward norms", "backward")
        if last:
            yield from self._reduce_all_for_step(self.norms)

    def _recompute_part(self, part: RotatedPart, index: int) -> Program:
        if part.recomputed_from is not None:
            for other in self.parts[part.recomputed_from : index + 1]:
                yield from self._forward_part(other, "recompute", other.seconds.recompute)

    def _forward_part(self, part: RotatedPart, kind: str, seconds: float) -> Program:
        of_slice = seconds / self.degree / len(part.halves)
        for half in part.halves:
            for buffer in self.of_unit[half]:
                yield from self._wait_for_updated(buffer)
            arriving: Works = ()
            for left in reversed(range(self.degree)):
                yield Wait(arriving)
                if left and not self.costs.in_place:
                    arriving = yield from self._shift(half, "gather")
                yield self._compute(of_slice, f"{kind} {half}", kind)
                if left and self.costs.in_place:
                    yield from self._shift_in_place(half, "gather")

    def _backward_part(self, part: RotatedPart, half: str) -> Program:
        slices = self.degree * len(part.halves)
        collecting = self.costs.collect_seconds(self.sizes[half].trainable_numel) / self.degree
        weights: Works = ()
        gradients: Works = ()
        for left in reversed(range(self.degree)):
            yield Wait(weights)
            if left and part.returns and not self.costs.in_place:
                weights = yield from self._shift(half, "gather")
            until_first = part.seconds.until_first_gradient / slices
            yield self._compute(until_first, f"backward {half}", "backward")
            yield Wait(gradients)
            rest = part.seconds.rest_of_backward / slices + collecting
            yield self._compute(rest, f"backward {half}", "backward")
            if left and self.costs.in_place:
                if part.returns:
                    yield from self._shift_in_place(half, "gather")
                yield from self._shift_in_place(half, "reduce")
            elif left:
                gradients = yield from self._shift(half, "reduce")

    def _wait_for_updated(self, buffer: Buffer) -> Program:
        yield Wait(buffer.updated)
        buffer.updated = ()

    def _reduce_all_for_step(self, buffers: Iterable[Buffer]) -> Program:
        for buffer in buffers:
            if buffer.costs.trainable:
                yield from self._step_reduce(self.buffers.index(buffer))

    def _shift(self, half: str, payload: _Payload) -> Generator[Compute | Wait, None, Works]:
        """Sends a slice to the next rank; waits for it if nothing overlaps; returns its work."""
        # On CPU ranks messages of weights and of gradients do not wait for each other.
        own_stream = self.costs.device.cores is not None
        use = "gradients" if own_stream and payload == "reduce" else "rotate"
        works: Works = ()
        for buffer in self.of_unit[half]:
            phases = buffer.costs.gather if payload == "gather" else buffer.costs.reduce
            works += self._queue(use, payload, f"{payload} {buffer.name}", phases[:1])
        yield from self._wait_unless_overlapped(works)
        return works

    def _shift_in_place(self, half: str, payload: _Payload) -> Program:
        yield Wait((yield from self._shift(half, payload)))
        unit, precision = self.sizes[half], self.costs.comm_costs.precision
        landed = unit.numel * BYTES_OF[precision.compute]
        if payload == "reduce":
            landed = unit.trainable_numel * BYTES_OF[precision.wire]
        yield self._compute(self.costs.copy_seconds(landed), f"copy {half}", "copy")
