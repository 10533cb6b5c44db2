"""Muon's arithmetic: the nearly orthogonal matrix of Newton-Schulz, scaled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from paro.optim.muon_config import Coefficients, MuonConfig

_EPS = 1e-7  # of the norm by which a matrix is divided


def muon_update(matrix: Tensor, config: MuonConfig) -> Tensor:
    """What the learning rate multiplies, from the momentum of a matrix in fp32."""
    with _matmul_precision(config.muon_fp32_matmul_prec):
        update = newton_schulz(matrix, config.coefficients())
    return update.mul_(config.scale(*matrix.shape))


def newton_schulz(matrix: Tensor, coefficients: tuple[Coefficients, ...]) -> Tensor:
    """Nearly the matrix with all its singular values 1, after one step for each coefficients."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if is_tall else matrix
    x = x / torch.linalg.vector_norm(x).clamp(min=_EPS)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


@contextmanager
def _matmul_precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
