"""Memory of a rank that reduces several blocks at once, as predicted and as allocated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.paro.planning.lone_rank import silence
from tests.paro.planning.memory.test_gathering import BF16, SMALL, Workload, measure, predict


def test_gradients_of_four_blocks_are_converted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload(
        strategy="2,2,8",
        config=SMALL,
        precision=replace(BF16, optimizer="muon"),
        batch_size=1,
        seq_length=8,
        prefetch_units=0,
        at="the reduction of blocks.0",
    )
    predicted = predict(workload, device="cpu")
    assert predicted.name == workload.at
    silence(monkeypatch)
    assert measure(workload, "cpu") == pytest.approx(predicted.total, rel=0.01)
