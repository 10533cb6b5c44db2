"""Joins the results of a part's slices: their sum, where they may share the norm of their input."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from model.config import LlamaConfig
from model.norm import SharedNorm

Slices = Iterable[Callable[..., Tensor]]


def add_slices(slices: Slices, *args: Any) -> Tensor:
    """Return the sum of the slices' partial results."""
    total: Tensor | None = None
    for run in slices:
        partial_BSD = run(*args)
        total = partial_BSD if total is None else total + partial_BSD
    assert total is not None, "no slices"
    return total


def add_slices_after(
    slices: Slices, norm_D: Tensor, config: LlamaConfig, x_BSD: Tensor, *args: Any
) -> Tensor:
    """Return the same of slices that share the norm of their input."""
    shared = SharedNorm(x_BSD, norm_D, config.norm_epsilon, fused=config.fuses_norms)
    out_BSD = add_slices(slices, x_BSD, *args, shared)
    shared.release()
    return out_BSD
