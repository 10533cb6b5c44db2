"""Predicted memory where ranks exchange tokens for heads is what a rank allocates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from model.config import RecomputeConfig
from paro.context_parallel.layout import ContextLayout
from tests.paro.planning.lone_rank import silence
from tests.paro.planning.memory.test_gathering import (
    EACH,
    FP32,
    KEEPS_CORE,
    SMALL,
    Workload,
    measure,
    predict,
)

# In bf16 a CPU's attention has buffers of its own, of whole samples here.
EXCHANGED = Workload(
    strategy="GGG",
    config=replace(SMALL, vocab_size=64),
    precision=FP32,
    batch_size=4,
    seq_length=256,
    context=ContextLayout(size=4, heads=4),
    at="backward",
)
CONFIGS = {
    "heads are exchanged": EXCHANGED.config,
    "exchanged keys and values are repeated, blocks recomputed": replace(
        EXCHANGED.config, num_query_groups=2, recompute=EACH
    ),
    "blocks are recomputed but for attention": replace(EXCHANGED.config, recompute=KEEPS_CORE),
    "the core of exchanged heads is recomputed": replace(
        EXCHANGED.config, recompute=RecomputeConfig(granularity="selective")
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_prediction_is_what_a_rank_allocates(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    workload = replace(EXCHANGED, config=CONFIGS[name])
    predicted = predict(workload, device="cpu")
    assert workload.at in predicted.name
    silence(monkeypatch)
    assert measure(workload, "cpu") == pytest.approx(predicted.total, rel=0.01)
