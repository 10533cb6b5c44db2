"""Costs of one optimizer step: compute, communication, their overlap, and a lower bound."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from paro.errors import UserError
from paro.planning.machine.collective_time import scalar_seconds
from paro.planning.machine.machine import Device, Machine
from paro.planning.step.comm_costs import CommCosts, seconds_of
from paro.planning.step.computing import Computing
from paro.planning.step.passes import PassLoads
from paro.step.actions import StepShape
from paro.step.plan import StepPlan, step_plan


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """The costs of a model's step under a strategy on a machine."""

    computing: Computing
    comm_costs: CommCosts
    pass_loads: PassLoads | None  # None where weights rotate
    prefetch_units: int
    updated_ahead: int | None = None  # units ahead of updated parameters' all-gathers; None: all
    num_micro_batches: int

    @property
    def shape(self) -> StepShape:
        """What the actions of the step depend on."""
        assert self.pass_loads is not None, "weights rotate"
        return self.pass_loads.counts.shape

    @property
    def plan(self) -> StepPlan:
        """The actions of the step."""
        return step_plan(self.shape, self.num_micro_batches, self.updated_ahead)

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

    @property
    def coding_seconds(self) -> float:
        """A rank's time for codes in a step, wherever it is spent."""
        return self.computing.coding_seconds(self.comm_costs.coding_bytes)

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
        least = max(compute + exposed, loads.intra, loads.inter, self._least_by_passes())
        return least / max(1.0, fastest) + scalar_seconds(self.machine)

    def _least_by_passes(self) -> float:
        """Lower bound by forwards and backwards, each with its own compute and collectives."""
        if not self.overlaps or self.pass_loads is None:
            return 0.0
        forward = sum(unit.forward for unit in self.computing.per_unit)
        backward = self.computing.seconds - forward + self.collect_seconds(self.num_trained)
        loads = self.pass_loads
        update = self.update_seconds(self.num_trained)
        first = max(update + self._exposed_gather() + forward, loads.first_forward)
        last = max(backward + self._exposed_reduction(), loads.last_backward)
        between = max(forward, loads.forward) + max(backward, loads.backward)
        more = self.num_micro_batches - 1
        return self.device.step_seconds + first + more * between + last

    def _always_exposed(self) -> float:
        return self._exposed_gather() + self._exposed_reduction()

    def _exposed_gather(self) -> float:
        """Seconds of the first gathers that no compute hides: of the first unit, of the second."""
        first, second = (
            sum(seconds_of(part.gather) for part in parts) for parts in self.comm_costs.per_unit[:2]
        )
        return max(first, second - self.computing.per_unit[0].forward)

    def _exposed_reduction(self) -> float:
        """Seconds of the last reductions that no compute hides: of the last unit, of the other."""
        trained = self.computing.first_trained
        last, other = (
            sum(seconds_of((*part.reduce, *part.step_reduce, *part.replicas)) for part in parts)
            for parts in (*self.comm_costs.per_unit, (), ())[trained : trained + 2]
        )
        if trained == len(self.computing.units):
            return 0.0
        unit = self.computing.per_unit[trained]
        numel = self.comm_costs.units[trained].trainable_numel
        hidden = unit.total - unit.forward + self.collect_seconds(numel)
        return max(last, other - hidden)


def device_of(machine: Machine) -> Device:
    """The device of a machine; `UserError` if its file has none."""
    if machine.device is None:
        raise UserError(
            f"machine {machine.name}: device is missing, which planning needs: add an object with "
            "name, memory_bytes, reserved_bytes, peak_flops, sustained_flops and "
            "memory_bytes_per_second"
        )
    return machine.device
