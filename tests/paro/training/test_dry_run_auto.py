"""Planner and dry run agree on what fits: a grid of models, ranks, devices and machines."""

from __future__ import annotations

import random
from itertools import product

import pytest

from paro.planning.machine.files import shipped_machines
from paro.planning.search.estimator import Estimator
from paro.training.dry_run import PlannedRun, plan_run
from tests.helpers.flags import configured

GRID = tuple(
    product(
        ("llama3.2-3B", "7B", "llama3-8B", "13B", "30B", "65B"),
        (8, 16, 32, 64),
        (24, 40, 80, 141),
        shipped_machines(),
        (1, 4, 8),
    )
)
SAMPLE = random.Random(15).sample(GRID, 8)
MUST_FIT = 5  # of the sample; for the others auto must report that nothing fits
LARGE = "--micro-batch-size 8"


def launch(preset: str, ranks: int, gigabytes: float, machine: str, more: str) -> PlannedRun:
    words = (
        f"--llama-preset {preset} --mock-data --seq-length 2048 --micro-batch-size 1 --bf16 "
        f"--global-batch-size 1024 --train-iters 10 --lr 1e-4 --recompute-granularity selective "
        f"--dry-run --world-size {ranks} --device-memory-gb {gigabytes} --paro-machine {machine}"
    )
    return plan_run(configured(f"{words} {more}"))


@pytest.mark.slow("plans as a user would")
def test_what_auto_chooses_the_dry_run_of_the_same_flags_accepts() -> None:
    accepted = 0
    for combination in SAMPLE:
        *where, size = combination
        more = f"--micro-batch-size {size} --paro-strategy auto"
        try:
            plan = launch(*where, more)
        except ValueError as mistake:
            if "--paro-strategy auto: nothing fits the " not in str(mistake):
                raise
            continue
        accepted += 1
        assert plan.fits, combination
        assert plan.memory.total <= combination[2] * 1e9
        assert plan.workload is not None
        own = Estimator(plan.workload).memory(plan.launch.candidate)
        assert own == plan.memory, combination
    assert accepted >= MUST_FIT


def test_what_leaves_too_little_for_nccl_is_neither_chosen_nor_accepted() -> None:
    """72.8 GB of tensors per rank, and as fast as the choice of auto."""
    larger = launch("llama3-8B", 64, 80, "dgx-h100", f"--paro-strategy 1,32,64 {LARGE}")
    assert 72e9 < larger.memory.allocated < 73e9
    assert larger.memory.total > 80e9
    assert not larger.fits
    assert launch("llama3-8B", 64, 80, "dgx-h100", f"--paro-strategy auto {LARGE}").fits
