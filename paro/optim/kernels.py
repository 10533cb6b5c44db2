"""A Triton kernel for the update: unscale, clip, AdamW and the parameters' copy in one pass."""

# Imported only where a run uses it. Triton reads annotations of a kernel's arguments as its own:
# they have none.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paro.optim.adamw import AdamW, Update

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


class TritonAdamW(AdamW):
    """AdamW in one pass: it reads gradient, master and moments once and writes all results once."""

    def step(self, grad: Tensor, update: Update) -> None:
        self._num_steps += 1
        beta1, beta2 = self.betas
        numel = self.param.numel()
        _adamw[(triton.cdiv(numel, _BLOCK),)](
            self.param,
            self.exp_avg,
            self.exp_avg_sq,
            grad,
            self.param if update.copy is None else update.copy,
            numel,
            update.factor,
            1.0 - update.lr * update.weight_decay,
            beta1,
            beta2,
            self.eps,
            update.lr / (1.0 - beta1**self._num_steps),
            (1.0 - beta2**self._num_steps) ** 0.5,
            COPIES=update.copy is not None,
            BLOCK=_BLOCK,
        )

    def set_num_steps(self, num_steps: int) -> None:
        self._num_steps = num_steps
