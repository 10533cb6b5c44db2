"""Seeded values, how near two tensors are, and a sink that collects a weight's gradient."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype)


def assert_near(
    found: Tensor | None, wanted: Tensor | None, label: str = "", *, within: float = 1e-5
) -> None:
    """Equal to `within` of the largest value."""
    assert found is not None, label
    assert wanted is not None, label
    assert found.shape == wanted.shape, label
    error = (found.float() - wanted.float()).abs().max() / wanted.float().abs().max()
    assert error <= within, f"{label}: {error:.1e}"


def all_near(
    found: Iterable[Tensor | None], wanted: Iterable[Tensor | None], *, within: float = 1e-5
) -> None:
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert_near(one, other, f"number {number}", within=within)


def assert_rounded(
    found: Iterable[Tensor | None], exact: Iterable[Tensor | None], dtype: torch.dtype
) -> None:
    """Of this type, and as far from the exact values as its rounding allows."""
    for one, other in zip(found, exact, strict=True):
        assert other is not None
        assert one.dtype == dtype
        error = torch.linalg.vector_norm(one.float() - other)
        assert error < 2 * torch.finfo(dtype).eps * torch.linalg.vector_norm(other)


class Sink:
    """A buffer for a gradient, to which it is added if asked for; notes its calls."""

    def __init__(self, buffer: Tensor, *, adds: bool = False) -> None:
        self.buffer, self.adds = buffer, adds
        self.calls: list[str] = []

    def open(self) -> tuple[Tensor, bool]:
        self.calls.append("open")
        return self.buffer, self.adds

    def close(self) -> None:
        self.calls.append("close")
