"""Weights in fp8 are kept while their values stay, and no longer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from model import fp8, layers
from model.config import RecomputeConfig
from model.fp8 import NO_CACHE, Fp8, Operand
from paro.precision import PrecisionConfig
from paro.training.step import train_step
from tests.helpers.training import TINY, begun, built
from tests.paro.planning.cases import LoneRank, llama, rank_of, run_of, silence

FLAGS = (
    f"{TINY} --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --seq-length 16 "
    "--global-batch-size 2 --train-iters 2 --fp8-format hybrid"
)
FULL = "--recompute-granularity full"
EACH = RecomputeConfig(granularity="full")
# Four blocks of few values: some CPUs multiply in fp8 a hundred times as slowly as in fp32.
FOUR = llama(4, 16, 32, heads=(1, 1, 16), length=64, vocab=64)
WEIGHTS = 4 * 7


@contextmanager
def casts_of_weights() -> Iterator[list[str]]:
    """What is made of a weight at each cast."""
    made: list[str] = []
    original = fp8.operand

    def cast(tensor: Tensor, how: Fp8 | None, **options: bool) -> Operand:
        if isinstance(tensor, nn.Parameter):
            forms = {"data": True, "transposed": False} | options
            made.append(" and ".join(name for name, wanted in forms.items() if wanted))
        return original(tensor, how, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "operand", cast)
        yield made


def in_fp8(strategy: str, recompute: RecomputeConfig | None = None, **more: Any) -> LoneRank:
    config = replace(FOUR, fp8_format="hybrid", recompute=recompute, **more)
    return rank_of(run_of(config, strategy, PrecisionConfig(compute="fp32")))


@pytest.mark.slow("trains several times")
def test_a_weight_is_cast_once_while_its_values_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    silence(monkeypatch)
    together = replace(EACH, num_layers=2)
    by_use = {"data": 2 * WEIGHTS, "transposed": 2 * WEIGHTS}
    by_gather = {"data": 2 * WEIGHTS, "data and transposed": 2 * WEIGHTS}
    for strategy, recompute, wanted in (
        ("NNG", None, {"data and transposed": WEIGHTS}),  # in two micro-batches
        ("NNG", EACH, {"data and transposed": WEIGHTS}),
        ("GGG", None, by_use),  # forward has one gather, backward another
        ("GGG", EACH, by_gather),
        ("GGG", together, by_gather),
    ):
        rank = in_fp8(strategy, recompute)
        for num_micro_batches in (2, 1, 2):
            with casts_of_weights() as made:
                rank.step(num_micro_batches)
            if num_micro_batches == 1:
                wanted_of_one = by_use if recompute is None else by_gather
                assert {form: 2 * made.count(form) for form in made} == wanted_of_one
            else:
                assert {form: made.count(form) for form in made} == wanted


@pytest.mark.verify
def test_a_kept_cast_is_an_input_of_a_compiled_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    silence(monkeypatch)
    for recompute in (None, EACH):
        rank = in_fp8("NNG", recompute, torch_compile="aot_eager")
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        for _ in range(2):
            with casts_of_weights() as made:
                rank.step(2)
            assert made == ["data and transposed"] * WEIGHTS
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "for all blocks"


@pytest.mark.slow("trains a step")
@pytest.mark.parametrize("strategy", ["NNG", "GGG"])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("recompute", [None, EACH])
def test_nothing_is_kept_after_backward(
    strategy: str, num_micro_batches: int, recompute: RecomputeConfig | None, monkeypatch: Any
) -> None:
    silence(monkeypatch)
    rank = in_fp8(strategy, recompute)
    blocks = [p for name, p in rank.model.model.named_parameters() if name.startswith("blocks")]
    tokens_BS, weights_BS = torch.zeros(1, 16, dtype=torch.int64), torch.ones(1, 16)

    def kept() -> int:
        return sum(p.fp8_cache.cast is not None for p in blocks)  # type: ignore[attr-defined]

    rank.model.begin_step(num_micro_batches)
    for index in range(num_micro_batches):
        last = index + 1 == num_micro_batches
        rank.model.forward_backward(tokens_BS, tokens_BS, weights_BS, last=last)
        assert kept() == (WEIGHTS if strategy == "NNG" and num_micro_batches > 1 else 0)
    rank.model.finish_grad_sync()
    assert kept() == 0
    rank.model.evaluate(tokens_BS, tokens_BS, weights_BS)
    assert kept() == 0


def trained(more: str) -> list[Tensor]:
    """The losses of steps and of evaluations after them, with values set in between."""
    config, training = built(f"{FLAGS} {more}")
    state, source = begun(config, training)
    tokens_BS = torch.arange(16).view(1, 16)
    found = []
    for _ in range(config.train.train_iters):
        found.append(torch.tensor(train_step(training, state, source).loss))
        found.append(training.model.evaluate(tokens_BS, tokens_BS, torch.ones(1, 16)))
        for unit in training.model.units:
            unit.param_shard.mul_(1.25)  # as loading would
        found.append(training.model.evaluate(tokens_BS, tokens_BS, torch.ones(1, 16)))
    found += [unit.param_shard.clone() for unit in training.model.units]
    training.close()
    return found


@pytest.mark.slow("trains several times")
@pytest.mark.parametrize(
    "more",
    [
        "",
        f"--bf16 {FULL}",
        "--lora-rank 2 --lora-target-modules all-linear --lora-base-dtype bf16",
        pytest.param(f"--bf16 --torch-compile aot_eager {FULL}", marks=pytest.mark.verify),
    ],
)
def test_results_are_those_of_casts_at_every_use(
    more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = trained(more)
    for module in (fp8, layers):
        monkeypatch.setattr(module, "fp8_cache_of", lambda _: NO_CACHE)
    torch._dynamo.reset()
    for found, wanted in zip(kept, trained(more), strict=True):
        assert torch.equal(found, wanted)
