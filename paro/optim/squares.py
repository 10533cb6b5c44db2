"""Products of a matrix with its own transpose, for Newton-Schulz: by Triton, or by torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from paro.optim import adamw

Square = Callable[[Tensor, tuple[float, float] | None], Tensor]
_WITHIN = 2.0**-7  # of the largest element, in bf16


def by_torch(x: Tensor, factors: tuple[float, float] | None = None) -> Tensor:
    """Computes `x @ x.T`; with factors (b, c), of a symmetric `x`, `b * x + c * x @ x`."""
    if factors is None:
        return x @ x.mT
    return torch.addmm(x, x, x, beta=factors[0], alpha=factors[1])


@cache
def choose_square(name: str, device: torch.device) -> tuple[Square, str]:
    """Returns how matrices in bf16 are squared, and a line about it, empty without a choice.

    By Triton, unless --adam-implementation names another, where a small product works.
    """
    if name not in ("auto", "triton") or device.type not in adamw.TRITON_DEVICES:
        return by_torch, ""
    try:
        from paro.optim.kernels import VERSION, square

        _compare(square, device)
    except Exception as error:  # whatever Triton, its compiler or the device's driver raises
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return by_torch, f"Newton-Schulz: torch's matmuls, because Triton fails: {reason}"
    return square, f"Newton-Schulz: symmetric products by Triton {VERSION}"


def _compare(square: Square, device: torch.device) -> None:
    """Raises `RuntimeError` unless two products are symmetric, and torch's to rounding."""
    x = torch.linspace(-3.0, 3.0, 130 * 70, device=device).sin_().view(130, 70).bfloat16()
    gram = square(x, None)
    for found, wanted in (
        (gram, by_torch(x)),
        (square(gram, (-1.5, 0.5)), by_torch(gram, (-1.5, 0.5))),
    ):
        error = float((found - wanted).abs().max() / wanted.abs().max())
        if not (error <= _WITHIN and torch.equal(found, found.mT)):
            raise RuntimeError(f"a product differs by {error:.2g} from torch's")
