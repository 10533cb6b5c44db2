"""What stands in for a part of a method that is taken out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paro.optim import muon
from paro.optim.adamw import Update
from paro.quantization.blocks import hadamard
from paro.spec.optim_config import MuonConfig
from tools.bench import ablated
from tools.bench.ablated import EVERY, in_parts, scaled, update

CONFIG = MuonConfig(muon_fp32_matmul_prec="highest")


def test_what_replaces_the_transform_has_its_scale_and_mixes_nothing() -> None:
    values = torch.randn(100, generator=torch.Generator().manual_seed(1))
    both = [transform(transform(values))[:100] for transform in (hadamard, scaled)]
    torch.testing.assert_close(both[0], 32 * values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(both[1], both[0], rtol=1e-5, atol=1e-5)
    assert scaled(values).numel() == hadamard(values).numel() == 128
    one = torch.zeros(32)
    one[3] = 1.0
    assert int(scaled(one).count_nonzero()) == 1
    assert int(hadamard(one).count_nonzero()) == 32


def test_every_part_is_made_orthogonal_by_itself_and_scaled_by_its_shape() -> None:
    tall = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    parts = in_parts(tall, CONFIG).split(8)
    for part, given in zip(parts, tall.split(8), strict=True):
        wanted = muon.orthogonal(given, CONFIG) * (8 / 32) ** 0.5  # spectral: sqrt of the rows
        torch.testing.assert_close(part, wanted)


def test_a_step_of_five_takes_whole_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(*_: object) -> Iterator[bool]:
        yield muon.orthogonal is in_parts

    monkeypatch.setattr(muon, "orthogonal", muon.orthogonal)  # restored afterwards
    monkeypatch.setattr(ablated, "_update", steps)
    muon_step: Any = None
    by = Update(lr=0.1, weight_decay=0.0)
    found = [next(iter(update(muon_step, by, step))) for step in range(1, EVERY + 1)]
    assert found == [True] * (EVERY - 1) + [False]
