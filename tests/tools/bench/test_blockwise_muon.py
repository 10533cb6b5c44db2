"""Muon whose Newton-Schulz takes parts of matrices in most steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paro.optim import matrices
from paro.optim.muon_config import MuonConfig
from tools.bench import blockwise_muon
from tools.bench.blockwise_muon import EVERY, in_parts, update

CONFIG = MuonConfig(muon_fp32_matmul_prec="highest")


def test_every_part_is_made_orthogonal_by_itself_and_scaled_by_its_shape() -> None:
    tall = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    parts = in_parts(tall, CONFIG).split(8)
    for part, given in zip(parts, tall.split(8), strict=True):
        wanted = matrices.orthogonal(given, CONFIG) * (8 / 32) ** 0.5  # spectral: sqrt of the rows
        torch.testing.assert_close(part, wanted)


def test_a_step_of_five_takes_whole_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(self: object, **_: Any) -> Iterator[bool]:
        yield matrices.orthogonal is in_parts

    monkeypatch.setattr(matrices, "orthogonal", matrices.orthogonal)  # restored afterwards
    monkeypatch.setattr(blockwise_muon, "_update", steps)
    muon: Any = None
    found = [next(iter(update(muon, step=step))) for step in range(1, EVERY + 1)]
    assert found == [True] * (EVERY - 1) + [False]
