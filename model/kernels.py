"""Triton kernels for what a block computes between matmuls: SwiGLU and the rotary embedding."""

# Imported only where a run uses them: a CPU's torch brings no Triton. Values are read in their own
# type, computed in fp32 and rounded once. The plain versions are in layers.py and rotary.py.
# Triton reads annotations of a kernel's arguments as its own: they have none.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # elements of a program
_MOST_HEADS = 16  # of a program of the rotary embedding, so that a thread has several channels

VERSION: str = triton.__version__


@triton.jit
def _swiglu(gate, up, out, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, g * tl.sigmoid(g) * u, mask=inside)


@triton.jit
def _swiglu_backward(grad, gate, up, grad_gate, grad_up, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    tl.store(grad_up + at, d * silu, mask=inside)
    tl.store(grad_gate + at, d * u * sigmoid * (1.0 + g * (1.0 - sigmoid)), mask=inside)
    tl.store(grad + at, silu * u, mask=inside)


@triton.jit
def _rotate(
    x, cos, sin, out, num_rows, num_heads, half, sign, HEADS: tl.constexpr, HALF: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, HALF)
    row, within = token % num_rows, channel < half
    c = tl.load(cos + row * 2 * half + channel, mask=within, other=0.0).to(tl.float32)
    s = tl.load(sin + row * half + channel, mask=within, other=0.0).to(tl.float32) * sign
    at = (token * num_heads + head[:, None]) * 2 * half + channel[None, :]
    inside = (head[:, None] < num_heads) & within[None, :]
    first = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + at + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, first * c[None, :] - second * s[None, :], mask=inside)
    tl.store(out + at + half, second * c[None, :] + first * s[None, :], mask=inside)


def swiglu(gate_BSF: Tensor, up_BSF: Tensor) -> Tensor:
    """`silu(gate) * up`."""
    gate, up = gate_BSF.contiguous(), up_BSF.contiguous()
    out = torch.empty_like(gate)
    _swiglu[(triton.cdiv(out.numel(), _BLOCK),)](gate, up, out, out.numel(), BLOCK=_BLOCK)
    return out


def swiglu_backward(
    grad_BSF: Tensor, gate_BSF: Tensor, up_BSF: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gate and up, and `silu(gate) * up`, which replaces the contiguous `grad`."""
    assert grad_BSF.is_contiguous()
    gate, up = gate_BSF.contiguous(), up_BSF.contiguous()
    grad_gate, grad_up, numel = torch.empty_like(gate), torch.empty_like(up), gate.numel()
    _swiglu_backward[(triton.cdiv(numel, _BLOCK),)](
        grad_BSF, gate, up, grad_gate, grad_up, numel, BLOCK=_BLOCK
    )
    return grad_gate, grad_up, grad_BSF


def rotate(x_BSNH: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool) -> Tensor:
    """As `rotate` in rotary.py; `cos` and `sin` are of all positions, or of every token."""
    x, cos, sin = x_BSNH.contiguous(), cos.contiguous(), sin.contiguous()
    *_, num_heads, channels = x.shape
    out, half = torch.empty_like(x), channels // 2
    heads = min(_MOST_HEADS, triton.next_power_of_2(num_heads))
    grid = (x.numel() // (num_heads * channels), triton.cdiv(num_heads, heads))
    _rotate[grid](
        x,
        cos,
        sin,
        out,
        cos.numel() // channels,
        num_heads,
        half,
        -1.0 if inverse else 1.0,
        HEADS=heads,
        HALF=triton.next_power_of_2(half),
    )
    return out
