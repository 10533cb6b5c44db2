"""Costs of one optimizer step: compute, communication, their overlap, and a lower bound."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from paro.errors import UserError
from paro.planning.machine.collective_time import scalar_seconds
from paro.planning.machine.machine import Device, Machine
from paro.planning.step.comm_costs import CommCosts, seconds_of
from paro.planning.step.computing import Computing


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """The costs of a model's step under a strategy on a machine."""

    computing: Computing
    comm_costs: CommCosts
    num_micro_batches: int
    prefetch_units: int = 1

    @property
    def machine(self) -> Machine:
        return self.comm_costs.machine

    @property
    def device(self) -> Device:
        return self.computing.device

    @property
    def overlaps(self) -> bool:
        """Whether communication overlaps with compute; if not, all of it is waited for."""
        return self.prefetch_units > 0

    @cached_property
    def num_trained(self) -> int:
        return sum(unit.trainable_numel for unit in self.comm_costs.units)

    def collect_seconds(self, trainable_numel: int) -> float:
        return self.computing.collect_seconds(
            self.comm_costs.strategy, self.comm_costs.precision, trainable_numel
        )

    def update_seconds(self, trainable_numel: int) -> float:
        return self.computing.update_seconds(
            self.comm_costs.strategy, self.comm_costs.precision, trainable_numel
        )

    def compute_seconds(self) -> float:
        """Compute time of the training thread in a step."""
        of_micro_batch = self.computing.seconds + self.collect_seconds(self.num_trained)
        update = self.update_seconds(self.num_trained)
        return of_micro_batch * self.num_micro_batches + update + self.device.step_seconds

    def least_seconds(self) -> float:
        """Lower bound of a step's time: no schedule beats its compute time or its link loads."""
        loads = self.comm_costs.loads(self.num_micro_batches)
        compute = self.compute_seconds()
        exposed = self._always_exposed() if self.overlaps else loads.one_by_one
        fastest = max(
            (f for g in self.machine.uneven for f in (g.compute, g.intra, g.inter)), default=1.0
        )
        least = max(compute + exposed, loads.intra, loads.inter)
        return least / max(1.0, fastest) + scalar_seconds(self.machine)

    def _always_exposed(self) -> float:
        """Seconds of the first unit's gather, and of the reduction of the last gradients."""
        first = self.computing.first_trained
        exposed = sum(seconds_of(part.gather) for part in self.comm_costs.per_unit[0])
        if first < len(self.computing.units):
            exposed += sum(
                seconds_of((*part.reduce, *part.step_reduce, *part.replicas))
                for part in self.comm_costs.per_unit[first]
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
