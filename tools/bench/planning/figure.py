"""A published figure and the planner's, and the workloads that both are about."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from model.config import LLAMA_PRESETS, LlamaConfig, RecomputeConfig
from paro.planning.machine.files import find_machine
from paro.planning.search.estimator import Estimate, Estimator
from paro.planning.search.search_space import Workload
from paro.planning.step.costs import device_of
from paro.precision import PrecisionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One published figure and ours; `tolerance` is relative, None where only the order counts."""

    name: str
    what: str
    published: float
    ours: float
    overlapped: float | None = None
    tolerance: float | None = 0.2
    note: str = ""

    @property
    def error(self) -> float:
        return self.ours / self.published - 1

    @property
    def holds(self) -> bool:
        return self.tolerance is None or abs(self.error) <= self.tolerance


def case_on(machine: str, model: LlamaConfig, ranks: int, **changes: Any) -> Workload:
    """A workload in bf16, accumulators too, on some ranks of a shipped machine, in groups of 8.

    `micro_batches` is the number per rank and step, 1 unless given.
    """
    size = changes.pop("micro_batch_size")
    seq_length = changes.pop("seq_length")
    return Workload(
        model=replace(model, max_position_embeddings=seq_length),
        machine=find_machine(machine).for_world(ranks, subject="--paro-machine"),
        group_size=8,
        seq_length=seq_length,
        micro_batch_size=size,
        global_batch_size=size * ranks * changes.pop("micro_batches", 1),
        precision=PrecisionConfig(compute="bf16", grad_reduce_in_bf16=True),
        **changes,
    )


def with_room_for(workload: Workload, num_bytes: int) -> Workload:
    """The workload on devices that have this many bytes for what is allocated, and no more."""
    device = replace(
        device_of(workload.machine),
        memory_bytes=num_bytes,
        reserved_bytes=0,
        communicator_bytes=0,
        fragmentation=0.0,
    )
    return replace(workload, machine=replace(workload.machine, device=device), memory_bytes=None)


def model_of(preset: str, *, recomputed: bool = False) -> LlamaConfig:
    full = RecomputeConfig(granularity="full")
    return replace(LLAMA_PRESETS[preset], recompute=full if recomputed else None)


def estimate(workload: Workload, strategy: str) -> Estimate:
    return Estimator(workload).estimate(workload.candidate(workload.strategy(strategy)))
