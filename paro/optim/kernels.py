"""A Triton kernel for the update: unscale, clip, AdamW and the parameters' copy in one pass."""

# Imported only where a run uses it. Triton reads annotations of a kernel's arguments as its own:
# they have none.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # elements of a program

VERSION: str = triton.__version__


@triton.jit
def _adamw(
    param, exp_avg, exp_avg_sq, grad, copy, numel, factor, kept, beta1, beta2, eps, step_size,
    correction, COPIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * factor
    m = tl.load(exp_avg + at, mask=inside, other=0.0)
    v = tl.load(exp_avg_sq + at, mask=inside, other=0.0)
    p = tl.load(param + at, mask=inside, other=0.0)
    m += (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    p = p * kept - step_size * m / (tl.sqrt(v) / correction + eps)
    tl.store(exp_avg + at, m, mask=inside)
    tl.store(exp_avg_sq + at, v, mask=inside)
    tl.store(param + at, p, mask=inside)
    if COPIES:
        tl.store(copy + at, p, mask=inside)


class TritonAdamW:
    """AdamW in one pass: it reads gradient, master and moments once and writes all results once."""

    def __init__(
        self,
        param: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        *,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        self._state = (param, exp_avg, exp_avg_sq)
        self._betas = betas
        self._eps = eps
        self._num_steps = 0

    def step(
        self,
        grad: Tensor,
        *,
        lr: float,
        weight_decay: float,
        factor: float = 1.0,
        copy: Tensor | None = None,
    ) -> None:
        self._num_steps += 1
        beta1, beta2 = self._betas
        param, exp_avg, exp_avg_sq = self._state
        _adamw[(triton.cdiv(param.numel(), _BLOCK),)](
            param,
            exp_avg,
            exp_avg_sq,
            grad,
            param if copy is None else copy,
            param.numel(),
            factor,
            1.0 - lr * weight_decay,
            beta1,
            beta2,
            self._eps,
            lr / (1.0 - beta1**self._num_steps),
            (1.0 - beta2**self._num_steps) ** 0.5,
            COPIES=copy is not None,
            BLOCK=_BLOCK,
        )

    def set_num_steps(self, num_steps: int) -> None:
        self._num_steps = num_steps
