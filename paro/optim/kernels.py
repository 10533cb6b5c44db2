"""A Triton kernel for the update: unscale, clip, AdamW and the parameters' copy in one pass."""

# Imported only where a run uses it. Triton reads annotations of a kernel's arguments as its own:
# they have none.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paro.optim.adamw import AdamW, Update

_BLOCK = 1024  # elements of a program

VERSION: str = triton.__version__


@triton.jit(do_not_specialize=["key1", "key2", "low", "width", "stride", "start"])
def _adamw(
    param, exp_avg, exp_avg_sq, grad, copy, numel, factor, kept, beta1, beta2, eps, step_size,
    correction, key1, key2, low, width, stride, start, COPIES: tl.constexpr,
    CUT: tl.constexpr, ROUNDS1: tl.constexpr, ROUNDS2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * factor
    m = tl.load(exp_avg + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq + at, mask=inside, other=0.0).to(tl.float32)
    p = tl.load(param + at, mask=inside, other=0.0)
    m += (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    p = p * kept - step_size * m / (tl.sqrt(v) / correction + eps)
    if ROUNDS1 or ROUNDS2:  # as in rounding.py
        j = at + low
        if CUT:  # else no element costs a division in 64 bits
            j += j // width * (stride - width)
        bits = (start + j).to(tl.uint32)
        bits ^= key1.to(tl.uint32)
        bits = (bits ^ (bits >> 16)) * 0x7FEB352D
        bits = (bits ^ (bits >> 15)) * 0x846CA68B
        bits = (bits ^ (bits >> 16)) ^ key2.to(tl.uint32)
        if ROUNDS1:
            words = m.to(tl.uint32, bitcast=True) + (bits & 0xFFFF)
            m = (words & 0xFFFF0000).to(tl.float32, bitcast=True)
        if ROUNDS2:
            words = v.to(tl.uint32, bitcast=True) + (bits >> 16)
            v = (words & 0xFFFF0000).to(tl.float32, bitcast=True)
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
        at, keys = self.rounding, (0, 0)
        if at is not None:
            keys = at.keys(self._num_steps)
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
            *keys,
            *((0, 1, 1, 0) if at is None else (at.low, at.width, at.stride, at.start)),
            CUT=at is not None and at.width != at.stride,
            ROUNDS1=self.exp_avg.dtype != torch.float32,
            ROUNDS2=self.exp_avg_sq.dtype != torch.float32,
            COPIES=update.copy is not None,
            BLOCK=_BLOCK,
        )

    def set_num_steps(self, num_steps: int) -> None:
        self._num_steps = num_steps
