"""The timing of Newton-Schulz: a batch has the results of its matrices, and mistakes are told."""

from __future__ import annotations

import pytest
import torch

from paro.optim.muon import newton_schulz
from tools.bench.bench_newton_schulz import CONFIG, batched, flops_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8, 8), (4, 12), (12, 4)])
def test_a_batch_has_the_results_of_its_matrices(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    matrices = torch.randn((3, *shape), generator=torch.Generator().manual_seed(1))
    expected = [newton_schulz(matrix, CONFIG.coefficients(), dtype) for matrix in matrices]
    found = batched(matrices, dtype)
    assert found.dtype == dtype
    within = {} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(found, torch.stack(expected), **within)


def test_the_flops_are_those_of_three_products_a_step() -> None:
    # X X^T and its square on the shorter side, and the result times X.
    assert flops_of(12, 4) == flops_of(4, 12) == 5 * 2 * (4 * 12 * 4 + 4**3 + 4 * 4 * 12)
