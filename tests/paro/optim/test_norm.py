"""The norm of gradients: of whole rows and of what is left of them."""

from __future__ import annotations

import math

import pytest
import torch

from paro.optim.finite import ROW, square_sum

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_every_element_counts_once(kind: torch.dtype) -> None:
    sizes = (0, 1, ROW - 1, ROW, 3 * ROW + 5)
    ranges = [torch.linspace(-1.0, 2.0, size).to(kind) for size in sizes]
    expected = sum(float(values.double().square().sum()) for values in ranges)
    assert float(square_sum(ranges, CPU)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("at", [0, ROW, 2 * ROW + 4])  # in rows and behind them
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_seen(at: int, bad: float) -> None:
    values = torch.zeros(2 * ROW + 5)
    values[at] = bad
    assert not math.isfinite(square_sum([values], CPU))
