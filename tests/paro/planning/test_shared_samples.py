"""Predicted memory where ranks share samples is what a rank allocates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from model.config import LlamaConfig, RecomputeConfig
from paro.planning.run_memory import RunMemory
from paro.spec.context_layout import ALONE, ContextLayout
from paro.spec.run_spec import RunSpec
from tests.paro.planning.lone_rank import silence
from tests.paro.planning.test_gathering import (
    EACH,
    KEEPS_CORE,
    SMALL,
    assert_predicted,
    measure,
    run,
)

HEADS = ContextLayout(size=4, heads=4)


# In bf16 a CPU's attention has buffers of its own, of whole samples where heads are exchanged.
def shared(layout: ContextLayout = HEADS, *, size: int = 4, **config: Any) -> RunSpec:
    """1,024 tokens in `size` samples."""
    model, length = replace(SMALL, **config), 1024 // size
    return run("GGG", model, micro_batch_size=size, seq_length=length, context=layout)


HEADS_AND_RING = ContextLayout(size=8, heads=4, inner=4)
CASES = {
    "heads are exchanged": shared(),
    "exchanged keys and values are repeated, blocks recomputed": shared(
        num_query_groups=2, recompute=EACH
    ),
    "blocks are recomputed but for attention": shared(recompute=KEEPS_CORE),
    "the core of exchanged heads is recomputed": shared(
        recompute=RecomputeConfig(granularity="selective")
    ),
    "a ring inside a group": shared(ContextLayout(size=4)),
    "a ring over groups": shared(ContextLayout(size=8, inner=8)),
    "a ring between groups, and in each": shared(ContextLayout(size=8)),
    "rings of more turns, blocks recomputed": shared(
        ContextLayout(size=8, inner=2), num_query_groups=2, recompute=EACH
    ),
    "keys and values are gathered": shared(ContextLayout(size=8, gathers=True)),
    "heads are exchanged, keys and values go round": shared(HEADS_AND_RING),
    # Of one sample, heads are views of the message that brought them.
    "the same of one sample": shared(HEADS_AND_RING, size=1),
}


@pytest.mark.parametrize("name", CASES)
def test_prediction_is_what_a_rank_allocates(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert_predicted(monkeypatch, CASES[name])


LONG = LlamaConfig(
    num_layers=4,
    hidden_size=256,
    ffn_hidden_size=688,
    num_attention_heads=8,
    num_query_groups=8,
    kv_channels=32,
    max_position_embeddings=8192,
    vocab_size=4096,
)


@pytest.mark.parametrize(
    "peak",
    [
        lambda run: RunMemory(None).of(run).allocations.total,
        pytest.param(measure, marks=pytest.mark.verify),
    ],
    ids=["predicted", "measured"],
)
@pytest.mark.parametrize(
    ("layout", "most"),
    [(ContextLayout(size=4), 0.30), (ContextLayout(size=4, heads=4), 0.35)],
)
def test_the_activations_of_a_sample_on_4_ranks_are_those_of_one_divided(
    monkeypatch: pytest.MonkeyPatch,
    layout: ContextLayout,
    most: float,
    peak: Callable[[RunSpec], int],
) -> None:
    """Of 8,192 tokens, beyond what a step of 64 takes."""
    silence(monkeypatch)

    def grows(layout: ContextLayout) -> int:
        given = {"micro_batch_size": 1, "num_micro_batches": 1, "context": layout}
        short, long = (run("GGG", LONG, seq_length=n, **given) for n in (64, 8192))
        return peak(long) - peak(short)

    assert grows(layout) <= most * grows(ALONE)
