"""Triton kernels for the update: AdamW and Muon's momentum in one pass, symmetric products."""

# Imported only where a run uses the kernels. The kernels' arguments have no annotations, since
# Triton would interpret them.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paro.optim.adamw import AdamW, AdamWUpdate
from paro.optim.muon import MomentumUpdate
from paro.optim.rounding import Rounding

_BLOCK = 1024  # elements per program
_TILE = {"TILE": 128, "DEPTH": 64}  # rows and columns of a product; length of the summed dim

VERSION: str = triton.__version__


@triton.jit
def _random_bits(at, key1, key2, low, width, stride, start, CUT: tl.constexpr):
    """Make 32 random bits for each element, as in rounding.py."""
    j = at + low
    if CUT:  # otherwise the 64-bit division is left out
        j += j // width * (stride - width)
    bits = (start + j).to(tl.uint32)
    bits ^= key1.to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return (bits ^ (bits >> 16)) ^ key2.to(tl.uint32)


@triton.jit
def _rounded(value, half):
    """Round a value to as many bits as bf16 has, by 16 random bits."""
    words = value.to(tl.uint32, bitcast=True) + half
    return (words & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["key1", "key2", "low", "width", "stride", "start"])
def _adamw(
    param, exp_avg, exp_avg_sq, grad, copy, average, numel, factor, kept, beta1, beta2, eps,
    step_size, correction, average_weight, key1, key2, low, width, stride, start,
    COPIES: tl.constexpr, AVERAGES: tl.constexpr, CUT: tl.constexpr, ROUNDS1: tl.constexpr,
    ROUNDS2: tl.constexpr, BLOCK: tl.constexpr,
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
    if ROUNDS1 or ROUNDS2:
        bits = _random_bits(at, key1, key2, low, width, stride, start, CUT)
        if ROUNDS1:
            m = _rounded(m, bits & 0xFFFF)
        if ROUNDS2:
            v = _rounded(v, bits >> 16)
    tl.store(exp_avg + at, m, mask=inside)
    tl.store(exp_avg_sq + at, v, mask=inside)
    tl.store(param + at, p, mask=inside)
    if COPIES:
        tl.store(copy + at, p, mask=inside)
    if AVERAGES:
        a = tl.load(average + at, mask=inside, other=0.0)
        tl.store(average + at, a + average_weight * (p - a), mask=inside)


@triton.jit(do_not_specialize=["key1", "key2", "low", "width", "stride", "start"])
def _momentum(
    kept, grad, read, numel, factor, decay, key1, key2, low, width, stride, start,
    NESTEROV: tl.constexpr, ROUNDS: tl.constexpr, CUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * factor
    m = tl.load(kept + at, mask=inside, other=0.0).to(tl.float32)
    m += (1.0 - decay) * (g - m)
    tl.store(read + at, m - (m - g) * (1.0 - decay) if NESTEROV else m, mask=inside)
    if ROUNDS:
        m = _rounded(m, _random_bits(at, key1, key2, low, width, stride, start, CUT) & 0xFFFF)
    tl.store(kept + at, m, mask=inside)


@triton.jit
def _square(
    x, out, rows, columns, row_stride, column_stride, of_x, of_square,
    ADDS: tl.constexpr, WIDENS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)  # tile (i, j) with j <= i, numbered row by row
    i = ((tl.sqrt(8.0 * number + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > number, i - 1, i)  # if the root was rounded up
    i = tl.where((i + 1) * (i + 2) // 2 <= number, i + 1, i)
    j = number - i * (i + 1) // 2
    r = i.to(tl.int64) * TILE + tl.arange(0, TILE)
    c = j.to(tl.int64) * TILE + tl.arange(0, TILE)
    k = tl.arange(0, DEPTH)
    left = x + r[:, None] * row_stride + k[None, :] * column_stride
    right = x + c[None, :] * row_stride + k[:, None] * column_stride
    total = tl.zeros((TILE, TILE), tl.float32)
    for begin in range(0, columns, DEPTH):
        within = begin + k < columns
        a = tl.load(left, mask=(r[:, None] < rows) & within[None, :], other=0.0)
        b = tl.load(right, mask=(c[None, :] < rows) & within[:, None], other=0.0)
        if WIDENS:  # Triton's interpreter multiplies no bf16
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total)
        left += DEPTH * column_stride
        right += DEPTH * column_stride
    total *= of_square
    inside = (r[:, None] >= c[None, :]) & (r[:, None] < rows)
    if ADDS:
        x_tile = x + r[:, None] * row_stride + c[None, :] * column_stride
        total += of_x * tl.load(x_tile, mask=inside, other=0.0).to(tl.float32)
    rounded = total.to(out.dtype.element_ty)
    tl.store(out + r[:, None] * rows + c[None, :], rounded, mask=inside)
    inside = (r[None, :] >= c[:, None]) & (r[None, :] < rows)
    tl.store(out + c[:, None] * rows + r[None, :], tl.trans(rounded), mask=inside)


def momentum(kept: Tensor, grad: Tensor, update: MomentumUpdate) -> Tensor:
    """Update momentum in place in one pass; return the values that Newton-Schulz reads."""
    config, factor, read_as, rounding, step = update
    read, numel = torch.empty_like(kept, dtype=read_as), kept.numel()
    args = kept, grad, read, numel, factor, config.muon_momentum, *_random_args(rounding, step)
    _momentum[(triton.cdiv(numel, _BLOCK),)](
        *args,
        NESTEROV=config.muon_nesterov,
        ROUNDS=rounding is not None,
        CUT=_is_cut(rounding),
        BLOCK=_BLOCK,
    )
    return read


def _random_args(at: Rounding | None, step: int) -> tuple[int, ...]:
    """Return the arguments of `_random_bits` except the first and the last."""
    if at is None:
        return 0, 0, 0, 1, 1, 0
    return *at.keys(step), at.low, at.width, at.stride, at.start


def _is_cut(at: Rounding | None) -> bool:
    return at is not None and at.width != at.stride


def square(x: Tensor, factors: tuple[float, float] | None = None) -> Tensor:
    """Compute `square_by_torch` (muon.py): half of the symmetric product, which is mirrored."""
    rows, tiles = x.shape[0], triton.cdiv(x.shape[0], _TILE["TILE"])
    out = x.new_empty(rows, rows)
    args = x, out, *x.shape, *x.stride(), *(factors or (0.0, 1.0))
    grid, how = (tiles * (tiles + 1) // 2,), {**_TILE, "num_warps": 8, "num_stages": 3}
    _square[grid](*args, ADDS=factors is not None, WIDENS=x.device.type == "cpu", **how)
    return out


class TritonAdamW(AdamW):
    """AdamW in one pass: gradient, master and moments are read once, all results written once."""

    def step(self, grad: Tensor, update: AdamWUpdate) -> None:
        beta1, beta2 = self.betas
        numel = self.param.numel()
        _adamw[(triton.cdiv(numel, _BLOCK),)](
            self.param,
            self.exp_avg,
            self.exp_avg_sq,
            grad,
            self.param if update.copy is None else update.copy,
            self.param if update.average is None else update.average,
            numel,
            update.factor,
            1.0 - update.lr * update.weight_decay,
            beta1,
            beta2,
            self.eps,
            update.lr / (1.0 - beta1**update.step),
            (1.0 - beta2**update.step) ** 0.5,
            update.average_weight,
            *_random_args(self.rounding, update.step),
            CUT=_is_cut(self.rounding),
            ROUNDS1=self.exp_avg.dtype != torch.float32,
            ROUNDS2=self.exp_avg_sq.dtype != torch.float32,
            COPIES=update.copy is not None,
            AVERAGES=update.average is not None,
            BLOCK=_BLOCK,
        )
