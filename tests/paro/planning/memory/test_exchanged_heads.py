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
    SMALL,
    Workload,
    measure,
    predict,
)

CASES = {
    # In bf16 a CPU's attention has buffers of its own, of whole samples here.
    "heads are exchanged": Workload(
        strategy="GGG",
        config=replace(SMALL, vocab_size=64),
        precision=FP32,
        batch_size=4,
        seq_length=256,
        context=ContextLayout(size=4, heads=4),
        at="backward",
    ),
    "exchanged keys and values are repeated, blocks recomputed": Workload(
        strategy="GGG",
        config=replace(SMALL, vocab_size=64, num_query_groups=2, recompute=EACH),
        precision=FP32,
        batch_size=4,
        seq_length=256,
        context=ContextLayout(size=4, heads=4),
        at="backward",
    ),
    "the core of exchanged heads is recomputed": Workload(
        strategy="GGG",
        config=replace(SMALL, vocab_size=64, recompute=RecomputeConfig(granularity="selective")),
        precision=FP32,
        batch_size=4,
        seq_length=256,
        context=ContextLayout(size=4, heads=4),
        at="backward",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_prediction_is_what_a_rank_allocates(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    workload = CASES[name]
    predicted = predict(workload, device="cpu")
    assert workload.at in predicted.name
    silence(monkeypatch)
    assert measure(workload, "cpu") == pytest.approx(predicted.total, rel=0.01)
