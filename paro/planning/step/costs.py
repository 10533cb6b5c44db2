"""Costs of one optimizer step: compute, communication, their overlap, and a lower bound."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from paro.errors import UserError
from paro.planning.machine.collective_time import scalar_seconds
from paro.planning.machine.machine import Device, Machine
from paro.planning.step.comm_costs import CommCosts, seconds_of
from paro.planning.step.computing import Computing


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What overlaps with compute; all else is waited for where it is submitted."""

    gathers: bool = True
    reductions: bool = True
    finishing: bool = True  # the step's gradient reduce-scatter and replica all-reduce
    publishing: bool = True  # the all-gather of updated parameters


EVERYTHING = Overlap()
NOTHING = Overlap(gathers=False, reductions=False, finishing=False, publishing=False)


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """The costs of a model's step under a strategy on a machine."""

    computing: Computing
    moves: CommCosts
    num_micro_batches: int
    prefetch_units: int = 1
    overlap: Overlap | None = None  # default: everything, or nothing without prefetch

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
        """Compute time of the training thread in a step."""
        of_micro_batch = self.computing.seconds + self.taking(self.num_trained)
        update = self.updating(self.num_trained)
        return of_micro_batch * self.num_micro_batches + update + self.device.step_seconds

    def least_seconds(self) -> float:
        """Lower bound of a step's time: no schedule beats its compute time or its link loads."""
        loads = self.moves.loads(self.num_micro_batches)
        compute = self.compute_seconds()
        exposed = loads.one_by_one if self.overlaps == NOTHING else self._never_hidden()
        fastest = max(
            (f for g in self.machine.uneven for f in (g.compute, g.intra, g.inter)), default=1.0
        )
        least = max(compute + exposed, loads.intra, loads.inter)
        return least / max(1.0, fastest) + scalar_seconds(self.machine)

    def _never_hidden(self) -> float:
        """Seconds of the first unit's gather, and of the reduction of the last gradients."""
        first = self.computing.first_trained
        exposed = sum(seconds_of(part.gather) for part in self.moves.per_unit[0])
        if first < len(self.computing.units):
            exposed += sum(
                seconds_of((*part.reduce, *part.finish, *part.replicas))
                for part in self.moves.per_unit[first]
            )
        return exposed


def device_of(machine: Machine) -> Device:
    """The device of a machine; `UserError` if its file has none."""
    if machine.device is None:
        raise UserError(
            f"machine {machine.name}: device is missing, which planning needs: add an object with "
            "name, memory_bytes, reserved_bytes, peak_flops, sustained_flops and "
            "memory_bytes_per_second"
        )
    return machine.device
