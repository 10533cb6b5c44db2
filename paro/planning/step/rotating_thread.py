"""Simulated training thread where weights rotate: the costs of moving and of computing slices."""

# Out of place, the next slice arrives while the current one is used. In backward the communication
# stream sends weights and gradients in turn; CPU ranks hand messages to the backend's own threads,
# which send both at once. In place, every shift is waited for, and the received data is copied.

from __future__ import annotations

from paro.planning.machine.machine import GroupSpeed
from paro.planning.step.computing import UnitSeconds
from paro.planning.step.rotating import RotatingCosts
from paro.planning.step.simulation import Actor, Program, Simulation, Wait
from paro.planning.step.thread import StepThread
from paro.step.actions import Verb


class RotatingThread(StepThread):
    """Computes every part with one slice after another, and sends each slice to the next rank."""

    costs: RotatingCosts

    def __init__(
        self, costs: RotatingCosts, simulation: Simulation, actor: Actor, speed: GroupSpeed
    ) -> None:
        super().__init__(costs, simulation, actor, speed)
        self._landings = dict.fromkeys((Verb.SHIFT, Verb.SHIFT_GRADS), 0.0)
        self._carried_out |= {
            Verb.SHIFT: self._shift,
            Verb.SHIFT_BACK: self._shift,
            Verb.WAIT_SHIFTED: self._wait_shifted,
            Verb.SHIFT_GRADS: self._shift_grads,
            Verb.WAIT_GRADS: self._wait_grads,
        }

    # Compute #

    def _forward(self, index: int, half: int = 0) -> Program:
        name, seconds, share = self._slice(index, half)
        yield self._compute(seconds.forward * share, f"forward {name}", "forward")

    def _recompute(self, index: int, half: int = 0) -> Program:
        name, seconds, share = self._slice(index, half)
        yield self._compute(seconds.recompute * share, f"recompute {name}", "recompute")

    def _backward(self, index: int, half: int = 0) -> Program:
        name, seconds, share = self._slice(index, half)
        until_first = seconds.until_first_gradient * share
        yield self._compute(until_first, f"backward {name}", "backward")

    def _gradients(self, index: int, half: int = 0) -> Program:
        name, seconds, share = self._slice(index, half)
        buffers = self.costs.computing.rotation.parts[index].halves[half]
        numel = self.buffers[buffers[0]].size.trainable_numel
        collecting = self.costs.collect_seconds(numel) / self.costs.computing.degree
        rest = seconds.rest_of_backward * share + collecting
        yield self._compute(rest, f"backward {name}", "backward")

    def _slice(self, index: int, half: int) -> tuple[str, UnitSeconds, float]:
        """A slice's unit, the times of its part, and the slice's share of them."""
        computing = self.costs.computing
        halves = computing.rotation.parts[index].halves
        share = 1 / (computing.degree * len(halves))
        return self.buffers[halves[half][0]].size.name, computing.per_part[index], share

    def _reduce(self, number: int) -> Program:
        """Collects the gradients of replicated parameters."""
        collecting = self.costs.collect_seconds(self.buffers[number].size.trainable_numel)
        yield self._compute(collecting, "backward norms", "backward")

    # Slices #

    def _shift(self, number: int, source: int, to: int) -> Program:
        buffer = self.buffers[number]
        name, phases = f"gather {buffer.name}", buffer.costs.gather[:1]
        buffer.gathered = self._queue("rotate", "gather", name, phases)
        landing = self.costs.landing_seconds(number, of_grads=False)
        self._landings[Verb.SHIFT] = landing if source == to else 0.0
        yield from self._wait_unless_overlapped(buffer.gathered)

    def _wait_shifted(self, number: int) -> Program:
        buffer = self.buffers[number]
        yield Wait(buffer.gathered)
        buffer.gathered = ()
        yield self._compute(self._landings[Verb.SHIFT], f"copy {buffer.name}", "copy")

    def _shift_grads(self, number: int, source: int, to: int, _scratch: int) -> Program:
        # On CPU ranks messages of weights and of gradients do not wait for each other.
        use = "gradients" if self.costs.device.cores is not None else "rotate"
        buffer = self.buffers[number]
        name, phases = f"reduce {buffer.name}", buffer.costs.reduce[:1]
        buffer.read = self._queue(use, "reduce", name, phases)
        landing = self.costs.landing_seconds(number, of_grads=True)
        self._landings[Verb.SHIFT_GRADS] = landing if source == to else 0.0
        yield from self._wait_unless_overlapped(buffer.read)

    def _wait_grads(self, number: int) -> Program:
        buffer = self.buffers[number]
        yield Wait(buffer.read)
        buffer.read = ()
        yield self._compute(self._landings[Verb.SHIFT_GRADS], f"copy {buffer.name}", "copy")
