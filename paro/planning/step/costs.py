"""One optimizer step: its computing, its moves, how they overlap, and the least it can take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from paro.planning.machine.collective_time import scalar_seconds
from paro.planning.machine.machine import Device, Machine
from paro.planning.step.comm_costs import CommCosts, seconds_of
from paro.planning.step.computing import Computing


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What goes on beside computing; what does not is waited for where it is submitted."""

    gathers: bool = True
    reductions: bool = True
    finishing: bool = True  # the last micro-batch's way on to the optimizer's shard
    publishing: bool = True


EVERYTHING = Overlap()
NOTHING = Overlap(gathers=False, reductions=False, finishing=False, publishing=False)


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """A step of a model under a strategy on a machine."""

    computing: Computing
    moves: CommCosts
    num_micro_batches: int
    prefetch_units: int = 1
    overlap: Overlap | None = None  # default: everything, or nothing if nothing is gathered ahead

    @property
    def machine(self) -> Machine:
        return self.moves.machine

    @property
    def device(self) -> Device:
        return self.computing.device

    @property
    def overlaps(self) -> Overlap:
        if self.overlap is not None:
            return self.overlap
        return EVERYTHING if self.prefetch_units else NOTHING

    @cached_property
    def num_trained(self) -> int:
        return sum(unit.trainable_numel for unit in self.moves.units)

    def taking(self, trainable_numel: int) -> float:
        return self.computing.taking_seconds(
            self.moves.strategy, self.moves.precision, trainable_numel
        )

    def updating(self, trainable_numel: int) -> float:
        return self.computing.update_seconds(
            self.moves.strategy, self.moves.precision, trainable_numel
        )

    def compute_seconds(self) -> float:
        """What the training thread does in a step."""
        of_micro_batch = self.computing.seconds + self.taking(self.num_trained)
        update = self.updating(self.num_trained)
        return of_micro_batch * self.num_micro_batches + update + self.device.step_seconds

    def least_seconds(self) -> float:
        """What a step takes at least: no schedule beats its computing, nor its links."""
        loads = self.moves.loads(self.num_micro_batches)
        compute = self.compute_seconds()
        exposed = loads.one_by_one if self.overlaps == NOTHING else self._never_hidden()
        fastest = max(
            (f for g in self.machine.uneven for f in (g.compute, g.intra, g.inter)), default=1.0
        )
        least = max(compute + exposed, loads.intra, loads.inter)
        return least / max(1.0, fastest) + scalar_seconds(self.machine)

    def _never_hidden(self) -> float:
        """The first unit's gather, and the way of the gradients that come last."""
        first = self.computing.first_trained
        exposed = sum(seconds_of(part.gather) for part in self.moves.per_unit[0])
        if first < len(self.computing.units):
            exposed += sum(
                seconds_of((*part.reduce, *part.finish, *part.replicas))
                for part in self.moves.per_unit[first]
            )
        return exposed


def device_of(machine: Machine) -> Device:
    """The device of a machine; `ValueError` where the file names none."""
    if machine.device is None:
        raise ValueError(
            f"machine {machine.name}: device is missing, which planning needs: add an object with "
            "name, memory_bytes, reserved_bytes, peak_flops, sustained_flops and "
            "memory_bytes_per_second"
        )
    return machine.device
