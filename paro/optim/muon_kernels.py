"""The momentum of Muon and products of a matrix with its own transpose, by Triton or by torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from paro.optim import adamw
from paro.optim.rounding import Rounding, round_into
from paro.spec.optim_config import MuonConfig

Square = Callable[[Tensor, tuple[float, float] | None], Tensor]
_WITHIN = 2.0**-7  # of the largest element, in bf16


class MomentumUpdate(NamedTuple):
    """An update of a range of momentum by a gradient times `factor`, in numbered steps.

    Momentum in bf16 needs a `rounding`.
    """

    config: MuonConfig
    factor: float
    read_as: torch.dtype  # by Newton-Schulz
    rounding: Rounding | None
    step: int


Momentum = Callable[[Tensor, Tensor, MomentumUpdate], Tensor]


class MuonKernels(NamedTuple):
    """Implementations of Muon's operations, and a line about them, empty without a choice."""

    momentum: Momentum
    square: Square
    line: str = ""


def momentum_by_torch(kept: Tensor, grad: Tensor, update: MomentumUpdate) -> Tensor:
    """Update momentum in place; return what Newton-Schulz reads."""
    config, factor, read_as, rounding, step = update
    grad = grad.float() * factor
    momentum = kept.float().lerp_(grad, 1.0 - config.muon_momentum)
    read = grad.lerp(momentum, config.muon_momentum) if config.muon_nesterov else momentum
    read = read.to(read_as, copy=True)
    if rounding is not None:
        round_into(momentum, rounding.bits(0, kept.numel(), step, kept.device), kept)
    return read


def square_by_torch(x: Tensor, factors: tuple[float, float] | None = None) -> Tensor:
    """Compute `x @ x.T`; with factors (b, c), of a symmetric `x`, `b * x + c * x @ x`."""
    if factors is None:
        return x @ x.mT
    return torch.addmm(x, x, x, beta=factors[0], alpha=factors[1])


BY_TORCH = MuonKernels(momentum_by_torch, square_by_torch)


@cache
def choose_muon_kernels(name: str, device: torch.device) -> MuonKernels:
    """Return how Muon's momentum is updated and how matrices in bf16 are squared.

    By Triton, unless --adam-implementation names another, where small ones work.
    """
    if name not in ("auto", "triton") or device.type not in adamw.TRITON_DEVICES:
        return BY_TORCH
    try:
        from paro.optim.kernels import VERSION, momentum, square

        _compare(MuonKernels(momentum, square), device)
    except Exception as error:  # whatever Triton, its compiler or the device's driver raises
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return BY_TORCH._replace(line=f"Muon: torch's operations, because Triton fails: {reason}")
    line = f"Muon: momentum in one pass and symmetric products by Triton {VERSION}"
    return MuonKernels(momentum, square, line)


def _compare(kernels: MuonKernels, device: torch.device) -> None:
    """Raise `RuntimeError` unless results are torch's to rounding, and products symmetric."""
    x = torch.linspace(-3.0, 3.0, 130 * 70, device=device).sin_().view(130, 70).bfloat16()
    rounding = Rounding(seed=0, name="", low=0, width=7, stride=9, start=2)
    found = []
    for one in (BY_TORCH, kernels):
        kept = [x.flatten().clone(), x.flatten().float()]
        read = [
            one.momentum(each, x.flatten(), MomentumUpdate(MuonConfig(), 0.5, x.dtype, at, step=1))
            for each, at in zip(kept, (rounding, None), strict=True)
        ]
        symmetric = x[:70] + x[:70].mT
        found.append((*kept, *read, one.square(x, None), one.square(symmetric, (-1.5, 0.5))))
    errors = [float((a - b).abs().max() / a.abs().max()) for a, b in zip(*found, strict=True)]
    if not (max(errors) <= _WITHIN and all(torch.equal(one, one.mT) for one in found[1][-2:])):
        raise RuntimeError(f"results differ by {max(errors):.2g} from torch's")
