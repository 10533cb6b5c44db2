"""The planner beside published runs of LLaMA on the shipped machines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from model.config import LLAMA_PRESETS, LoraConfig, RecomputeConfig, targets_of
from model.trainable import Trainable
from paro.machine.files import find_machine
from paro.planning.computing import device_of
from paro.planning.estimator import Estimate, Estimator
from paro.planning.search_space import PlanRequest
from tests.paro.planning.cases import plan_request

pytestmark = pytest.mark.verify
SMALL = LLAMA_PRESETS["7B"]
LARGE = replace(LLAMA_PRESETS["65B"], recompute=RecomputeConfig(granularity="full"))
ADAPTED = replace(LARGE, lora=LoraConfig(rank=16, targets=targets_of("all-linear")))  # 0.31%
SIXTEENTH = Trainable.of_flag("last-blocks:0.0625")


def run_on(name: str, ranks: int, size: int, count: int, **changes: Any) -> PlanRequest:
    """A run with `count` micro-batches of `size` a step and flat collectives."""
    batch = {"micro_batch_size": size, "global_batch_size": size * ranks * count}
    machine = find_machine(name).for_world(ranks, subject="--paro-machine")
    return plan_request(machine=machine, **{"collective": "flat"} | batch | changes)


def paro(ranks: int = 32, size: int = 4, count: int = 10, **changes: Any) -> PlanRequest:
    """PaRO's runs; nothing overlaps in the code that was released."""
    return run_on("dgx-a100-roce100", ranks, size, count, prefetch_units=0, **changes)


def estimate(run: PlanRequest, strategy: str) -> Estimate:
    return Estimator(run).estimate(run.candidate(run.strategy(strategy)))


def gain(run: PlanRequest, slower: str, faster: str) -> float:
    return estimate(run, slower).seconds / estimate(run, faster).seconds


def test_gains_in_paros_main_tables() -> None:
    """The bandwidth between its nodes is a fit to these."""
    assert gain(paro(model=SMALL), "GGG", "IIG") == pytest.approx(2.28, rel=0.2)
    assert gain(paro(model=SMALL), "NGG", "NII") == pytest.approx(1.67, rel=0.2)
    assert gain(paro(model=LARGE), "GGG", "IIG") == pytest.approx(1.86, rel=0.2)


def test_65b_fits_on_32_devices_where_paro_ran_it() -> None:
    run, named = paro(model=LARGE), ("NGG", "NII", "NIG", "III", "IIG", "IGG", "GGG")
    assert {name for name in named if estimate(run, name).fits} == {"IIG", "IGG", "GGG"}


def test_the_gain_with_the_largest_micro_batches_that_fit() -> None:
    def largest(strategy: str) -> Estimate:
        sizes = [size for size in range(540, 0, -1) if 540 % size == 0]
        found = (estimate(paro(64, s, 540 // s, model=LARGE), strategy) for s in sizes)
        return next(one for one in found if one.fits)

    assert largest("GGG").seconds / largest("IIG").seconds == pytest.approx(0.62 / 0.47, rel=0.2)


def test_partial_training_gains_in_paros_order() -> None:
    small, large = (paro(model=model, trainable=SIXTEENTH) for model in (SMALL, LARGE))
    assert 1 < gain(small, "NGG", "NIG") < gain(small, "NGG", "NII")
    assert 1 < gain(large, "GGG", "III") < gain(large, "GGG", "IIG")
    assert gain(paro(model=ADAPTED), "GGG", "ING") > 1


@pytest.mark.parametrize(
    ("run", "published"),
    [
        (run_on("a800-ib800", 64, 1, 4, model=SMALL, seq_length=4096), 4416),
        (run_on("a800-ib800", 64, 1, 8, model=SMALL, seq_length=4096), 4503),
        (run_on("a100-roce400", 8, 2, 4, model=SMALL, seq_length=2048), 4078),
    ],
    ids=["AMSP, 4 micro-batches", "AMSP, 8 micro-batches", "InternEvo"],
)
def test_tokens_per_second_where_links_do_not_limit(run: PlanRequest, published: float) -> None:
    """From these runs come the sustained FLOP/s of their machines."""
    tokens = estimate(run, "1,1,8").tokens_per_second / run.world_size
    assert tokens == pytest.approx(published, rel=0.02)


def test_mfu_of_mics_on_1024_devices() -> None:
    """It overlaps nothing. The device is a line through AMSP's overlapped runs on 64 devices."""
    run = run_on("a800-ib800", 1024, 1, 1, model=SMALL, seq_length=4096, prefetch_units=0)
    device = replace(device_of(run.machine), sustained_flops=221.8e12, step_seconds=0.219)
    fitted = replace(run, machine=replace(run.machine, device=device), collective="native")
    assert estimate(fitted, "8,8,8").mfu == pytest.approx(0.35, rel=0.15)
