"""The computation of a rank, the part of its peak that counts as used, and published runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from model.config import LLAMA_PRESETS, LoraConfig, RecomputeConfig, targets_of
from model.trainable import Trainable
from model.units import flops_per_token
from paro.machine.files import find_machine
from paro.planning.computing import device_of
from paro.planning.estimator import Estimate, Estimator
from paro.planning.search_space import PlanRequest
from paro.spec.context_layout import ContextLayout
from paro.spec.run_spec import Materialize
from tests.paro.planning.cases import DEVICE, SMALL, compute_seconds, costs, machine, plan_request


def mfu(given: PlanRequest, strategy: str = "III") -> float:
    return Estimator(given).estimate(given.candidate(given.strategy(strategy))).mfu


@pytest.mark.parametrize("materialize", [Materialize.GATHER, Materialize.ROTATE])
def test_all_that_trains_is_counted_as_in_a_training(materialize: Materialize) -> None:
    model = replace(SMALL, recompute=RecomputeConfig(granularity="full"))
    given = plan_request(model, materialize=materialize)
    estimate = Estimator(given).estimate(given.candidate(given.strategy("III")))
    of_token = flops_per_token(model, given.seq_length, causal=False)
    per_device = of_token * given.global_batch_size * given.seq_length / given.world_size
    assert estimate.mfu == pytest.approx(per_device / estimate.seconds / DEVICE.peak_flops)


KEPT = RecomputeConfig(granularity="full", keeps_core=True)


@pytest.mark.parametrize(
    ("layout", "recompute", "apart", "rate"),
    [
        (ContextLayout(), None, False, "attention_flops"),
        (ContextLayout(size=8, heads=8), None, False, "attention_flops"),
        (ContextLayout(size=8), None, False, "parts_flops"),
        (ContextLayout(size=8, heads=2), None, False, "parts_flops"),
        (ContextLayout(size=8, gathers=True), None, False, "parts_flops"),
        (ContextLayout(), KEPT, False, "parts_flops"),
        (ContextLayout(size=8, heads=8), KEPT, False, "parts_flops"),
        (ContextLayout(), None, True, "documents_flops"),
        (ContextLayout(size=8), KEPT, True, "documents_flops"),
    ],
)
def test_every_way_of_attention_has_the_rate_of_its_kernel(
    layout: ContextLayout, recompute: RecomputeConfig | None, rate: str, *, apart: bool
) -> None:
    """And the rate of whole samples, where the machine has none of it."""
    model = replace(SMALL, recompute=recompute)
    rates = ("attention_flops", "parts_flops", "documents_flops")

    def seconds(**given: float) -> float:
        own = machine(device=replace(DEVICE, **given))
        case = plan_request(model, machine=own, seq_length=2**16, context=layout, apart=apart)
        return compute_seconds(costs(case, "III"))

    fast, slow = DEVICE.sustained_flops, DEVICE.sustained_flops / 3
    all_fast = dict.fromkeys(rates, fast)
    for each in rates:
        assert (seconds(**(all_fast | {each: slow})) > seconds(**all_fast)) == (each == rate), each
    assert seconds(attention_flops=slow) == seconds(**dict.fromkeys(rates, slow))


@pytest.mark.parametrize(
    ("trainable", "lora"),
    [
        (Trainable(share=0.25), None),
        (Trainable(), LoraConfig(rank=4, targets=targets_of("all-linear"))),
    ],
)
def test_what_is_not_computed_does_not_count(trainable: Trainable, lora: LoraConfig | None) -> None:
    given = plan_request(replace(SMALL, lora=lora), trainable=trainable)
    assert 0 < mfu(given) <= DEVICE.sustained_flops / DEVICE.peak_flops
    part, everything = (costs(one, "III").computing for one in (given, plan_request()))
    assert everything.seconds / 3 < part.seconds < everything.seconds
    trained = trainable.names(given.model)
    of_token = flops_per_token(given.model, given.seq_length, trained, causal=False)
    # The first trained block's gradients of its input are computed, too; adapters take no time.
    products = part.seconds * DEVICE.sustained_flops
    assert products == pytest.approx(of_token * part.run.num_tokens, rel=0.1)


LLAMA_7B = LLAMA_PRESETS["7B"]
LLAMA_65B = replace(LLAMA_PRESETS["65B"], recompute=RecomputeConfig(granularity="full"))


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


@pytest.mark.verify
def test_gains_in_paros_main_tables() -> None:
    """The bandwidth between its nodes is a fit to these."""
    assert gain(paro(model=LLAMA_7B), "GGG", "IIG") == pytest.approx(2.28, rel=0.2)
    assert gain(paro(model=LLAMA_7B), "NGG", "NII") == pytest.approx(1.67, rel=0.2)
    assert gain(paro(model=LLAMA_65B), "GGG", "IIG") == pytest.approx(1.86, rel=0.2)


@pytest.mark.verify
def test_65b_fits_on_32_devices_where_paro_ran_it() -> None:
    run, named = paro(model=LLAMA_65B), ("NGG", "NII", "NIG", "III", "IIG", "IGG", "GGG")
    assert {name for name in named if estimate(run, name).fits} == {"IIG", "IGG", "GGG"}


@pytest.mark.verify
@pytest.mark.parametrize(
    ("run", "published"),
    [
        (run_on("a800-ib800", 64, 1, 4, model=LLAMA_7B, seq_length=4096), 4416),
        (run_on("a800-ib800", 64, 1, 8, model=LLAMA_7B, seq_length=4096), 4503),
        (run_on("a100-roce400", 8, 2, 4, model=LLAMA_7B, seq_length=2048), 4078),
    ],
    ids=["AMSP, 4 micro-batches", "AMSP, 8 micro-batches", "InternEvo"],
)
def test_tokens_per_second_where_links_do_not_limit(run: PlanRequest, published: float) -> None:
    """From these runs come the sustained FLOP/s of their machines."""
    tokens = estimate(run, "1,1,8").tokens_per_second / run.world_size
    assert tokens == pytest.approx(published, rel=0.02)


@pytest.mark.verify
def test_mfu_of_mics_on_1024_devices() -> None:
    """It overlaps nothing. The device is a line through AMSP's overlapped runs on 64 devices."""
    run = run_on("a800-ib800", 1024, 1, 1, model=LLAMA_7B, seq_length=4096, prefetch_units=0)
    device = replace(device_of(run.machine), sustained_flops=221.8e12, step_seconds=0.219)
    fitted = replace(run, machine=replace(run.machine, device=device), collective="native")
    assert estimate(fitted, "8,8,8").mfu == pytest.approx(0.35, rel=0.15)
