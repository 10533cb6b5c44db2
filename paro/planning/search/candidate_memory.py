"""Predicts what a rank of each candidate takes of its device; shared parts are computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paro.planning.cost_model import UnitSize, code_bytes
from paro.planning.machine.choice import pieces_by
from paro.planning.memory.device import (
    Communication,
    DeviceMemory,
    algorithms_of,
    nccl_communication,
)
from paro.planning.memory.gathering import MemorySnapshot, PeakMemory
from paro.planning.memory.rotating import rotating_peak
from paro.planning.search.search_space import Candidate, Workload
from paro.planning.step.computing import Computing
from paro.topology import make_topology


class CandidateMemory:
    """The device memory of one workload's candidates."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._pieces = pieces_by(workload.machine)
        self._peaks: dict[tuple[object, ...], PeakMemory] = {}
        self._communication: dict[tuple[object, ...], Communication] = {}

    def of(
        self, candidate: Candidate, units: Sequence[UnitSize], computing: Computing
    ) -> DeviceMemory:
        """At the memory snapshot of a step with the largest total."""
        allocations = self._allocations(candidate, units, computing)
        communication = self._communication_of(candidate, units)
        return self._workload.overheads.added_to(allocations, communication)

    def _allocations(
        self, candidate: Candidate, units: Sequence[UnitSize], computing: Computing
    ) -> MemorySnapshot:
        workload = self._workload
        if candidate.materialize.rotates:
            return rotating_peak(
                candidate.strategy,
                units,
                workload.precision,
                computing.model,
                computing.batch,
                in_place=candidate.materialize.in_place,
            )
        key = (candidate.micro_batch_size, candidate.recompute)
        if key not in self._peaks:
            self._peaks[key] = PeakMemory(
                world_size=workload.world_size,
                units=tuple(units),
                precision=workload.precision,
                model=computing.model,
                batch=computing.batch,
                prefetch_units=workload.prefetch_units,
                num_micro_batches=workload.micro_batches(candidate.micro_batch_size),
            )
        return self._peaks[key].of(candidate.strategy)

    def _communication_of(self, candidate: Candidate, units: Sequence[UnitSize]) -> Communication:
        workload, strategy = self._workload, candidate.strategy
        precision = candidate.precision(workload)
        key = (strategy.degrees, candidate.collective, candidate.materialize, precision)
        if key not in self._communication:
            topology = make_topology(
                world_size=workload.world_size,
                group_size=workload.group_size,
                degrees=strategy.degrees,
            )
            found = Communication()
            if workload.device_type == "cuda":
                found = nccl_communication(
                    strategy,
                    topology,
                    units,
                    precision,
                    algorithms_of(candidate.collective, workload.machine),
                    self._pieces,
                    rotates=candidate.materialize.rotates,
                )
            codes = code_bytes(strategy, topology, units, precision)
            self._communication[key] = replace(found, code_bytes=codes)
        return self._communication[key]
