"""Compiled blocks equal plain ones, and are compiled once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.config import Compiler, LlamaConfig, RecomputeConfig
from model.fusion import check_compiler, compiled
from model.llama import Llama
from tests.helpers.refusals import refused
from tests.model.test_llama import BOTH, CONFIGS, MHA, assert_trains_alike, batch, build, train_once
from tests.model.values import assert_near

CPU = torch.device("cpu")
KINDS = {
    "mha": MHA,
    "biases, norms of heads": BOTH,
    "odd ffn, wide heads": CONFIGS["odd ffn, wide heads"],
    "tied": CONFIGS["tied"],
    "a chosen kernel": replace(BOTH, attention_backend="flash"),
    "scores kept": replace(MHA, attention_backend="unfused"),
    "core recomputed": replace(BOTH, recompute=RecomputeConfig(granularity="selective")),
    "recomputed": replace(MHA, recompute=RecomputeConfig(granularity="full")),
    "two together": replace(MHA, recompute=RecomputeConfig(granularity="full", num_layers=2)),
}


def compiling(config: LlamaConfig, backend: Compiler = "aot_eager") -> LlamaConfig:
    return replace(config, torch_compile=backend)


def fresh_counters() -> dict[str, Any]:
    torch._dynamo.reset()
    counters: dict[str, Any] = torch._dynamo.utils.counters
    counters.clear()
    return counters


# The graphs of other kinds are the same, but for sizes and kernels.
OFTEN = ("biases, norms of heads", "core recomputed")


@pytest.mark.slow("traces a model")
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in OFTEN else pytest.mark.verify) for k in KINDS]
)
def test_a_block_is_one_graph_unless_its_core_differs_and_equals_the_plain_one(kind: str) -> None:
    counters = fresh_counters()
    assert_trains_alike(build(compiling(KINDS[kind])), build(KINDS[kind]))
    outside = kind in ("scores kept", "core recomputed")
    assert counters["stats"]["unique_graphs"] == (2 if outside else 1)


@pytest.mark.verify
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_by_inductor(kind: str) -> None:
    assert_trains_alike(build(compiling(KINDS[kind], "inductor")), build(KINDS[kind]))


def errors_of(config: LlamaConfig, exact: dict[str, Tensor]) -> dict[str, float]:
    """How far bf16's gradients are from the exact ones, relative to these."""
    _, found = train_once(build(config).bfloat16())
    return {
        name: float((found[name].float() - wanted).norm() / wanted.norm())
        for name, wanted in exact.items()
    }


IN_FP8 = replace(MHA, fp8_format="hybrid", num_layers=1)


@pytest.mark.slow("traces a model")
@pytest.mark.parametrize(
    ("config", "factor", "most"),
    [(BOTH, 2.0, 0.2), pytest.param(IN_FP8, 1.5, 0.75, marks=pytest.mark.verify)],
)
def test_low_precision_is_as_exact_as_in_plain_blocks(
    config: LlamaConfig, factor: float, most: float
) -> None:
    """aot_eager rounds between all operations, inductor less often."""
    _, exact = train_once(build(replace(config, fp8_format=None)))
    plain, found = errors_of(config, exact), errors_of(compiling(config), exact)
    for name, error in plain.items():
        assert found[name] < factor * error < most, name


def apart(model: Llama, lengths: tuple[int, ...]) -> Tensor:
    positions = torch.cat([torch.arange(length) for length in lengths]).view(2, 64)
    loss: Tensor = model(*batch(), positions_BS=positions, document_lengths=lengths)
    loss.backward()
    return loss.detach()


@pytest.mark.verify
@pytest.mark.slow("traces a model")
def test_other_documents_and_other_blocks_need_no_other_graph() -> None:
    counters = fresh_counters()
    model, plain = build(compiling(MHA)), build(MHA)
    for number, lengths in enumerate(((5, 59, 64), (1, 63, 40, 24), (64, 64), (30, 34, 64))):
        assert_near(apart(model, lengths), apart(plain, lengths), f"{lengths}")
        if number == 0:
            first = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == first == 2
    with torch.no_grad():
        model(batch()[0], document_lengths=(64, 64))
    assert counters["stats"]["unique_graphs"] == 4  # positions and no gradients


@pytest.mark.slow("traces ten graphs")
def test_a_block_may_have_more_graphs_than_torch_allows_by_default() -> None:
    """Blocks that freeze different weights have graphs of their own, and so have evaluations."""
    torch._dynamo.reset()
    double = compiled(lambda x: x + x, "aot_eager")
    for size in range(2, 12):
        assert double(torch.ones(size)).tolist() == [2.0] * size


@pytest.mark.slow("imports the compiler")
def test_a_missing_compiler_is_told_and_that_inductor_has_no_fp8_on_a_cpu(tmp_path: Path) -> None:
    from torch._inductor.utils import fresh_cache  # takes as long to import as torch

    config = replace(MHA, fp8_format="hybrid")
    by_inductor = compiling(config, "inductor")
    refused(lambda: check_compiler(by_inductor, CPU), "--torch-compile inductor ... --fp8-format")
    check_compiler(compiling(config), CPU)
    check_compiler(MHA, CPU)
    torch._dynamo.reset()
    without = torch._inductor.config.patch({"cpp.cxx": (str(tmp_path / "missing"),)})
    with without, fresh_cache():
        refused(lambda: check_compiler(compiling(MHA, "inductor"), CPU), "--torch-compile inductor")
