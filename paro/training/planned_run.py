"""A run that is not started: its rank 0 on the meta device, its memory and time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from paro.config.checkpoint import resumed_samples
from paro.config.run import RunConfig
from paro.distributed.control import PlannedControl
from paro.planning.cost_model import UnitSize
from paro.planning.memory.device import DeviceMemory
from paro.planning.search.estimator import Estimate, Estimator
from paro.planning.search.run_memory import RunMemory
from paro.planning.search.search_space import Workload
from paro.training.assembly import build_training
from paro.training.memory_check import plan_of
from paro.training.planned_time import workload_of
from paro.training.step import Training


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A run that is not started, and its rank 0 on the meta device: shapes without storage."""

    config: RunConfig
    training: Training
    units: tuple[UnitSize, ...]  # for the cost model
    memory: DeviceMemory
    workload: Workload | None  # None unless --paro-machine names a device
    launch: Estimate | None  # on that device; None with --skip-train
    other_bits: Estimate | None = None  # the same with 16 bits instead of codes, or the reverse
    consumed: int = 0  # training samples consumed before a resumed run

    @property
    def num_micro_batches(self) -> int:
        return self.config.batches.num_micro_batches_at(self.consumed)

    @property
    def device_bytes(self) -> int | None:
        """The memory of a device; None where neither flag names one."""
        gigabytes = self.config.launch.device_memory_gb
        if self.workload is not None:
            return self.workload.device_bytes
        return None if gigabytes is None else round(gigabytes * 1e9)

    @property
    def fits(self) -> bool:
        return self.device_bytes is None or self.memory.total <= self.device_bytes


def plan_run(config: RunConfig) -> PlannedRun:
    """Builds one rank on the meta device; `UserError` for what cannot be built."""
    control = PlannedControl(config.world, torch.device("meta"))
    on_meta = build_training(config, control)
    device = "cpu" if config.runtime.distributed_backend == "gloo" else "cuda"
    training = replace(on_meta, device=torch.device(device))  # decides which kernels are assumed
    memory, run = RunMemory(config.sharding.machine), plan_of(config, device)
    peak = memory.of(run)
    workload, launch, other_bits = workload_of(config, device), None, None
    if workload is not None and config.trained:
        estimator, candidate = Estimator(workload), workload.candidate(config.strategy)
        # Evaluations and other steps of a schedule may need more memory than the one that is timed.
        launch = replace(estimator.estimate(candidate), memory=peak)
        other = estimator.with_other_bits(candidate)
        other_bits = None if other is None else estimator.estimate(other)
    return PlannedRun(
        config=config,
        training=training,
        units=memory.units(run),
        memory=peak,
        workload=workload,
        launch=launch,
        other_bits=other_bits,
        consumed=resumed_samples(config.checkpoint) if config.batches.changes else 0,
    )
