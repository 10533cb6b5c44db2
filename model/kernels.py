"""Triton kernels for operations of a model between matmuls: norms, SwiGLU, fp8 casts, the loss."""

# Imported only where a run uses them: a CPU's torch brings no Triton. Values are read in their own
# type, computed in fp32 and rounded once. The plain versions are in layers.py, rotary.py and, with
# the same bits as here, fp8.py.
# Triton reads annotations of a kernel's arguments as its own: they have none.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.fp8 import known_largest, remember_largest

_BLOCK = 1024  # elements per program of elementwise kernels
_MOST_HEADS = 16  # heads at most per program of rotary embedding: several channels per thread
_MAXIMUM_BLOCK = 8192  # elements per program of the kernel that finds the amax
_NORM_PROGRAMS = 264  # programs at most of norm backward, 2 per SM of an H100; each sums its rows
_LOSS_BLOCK = 8192  # logits that a program reads at a time
_TILE = {"ROWS": 64, "COLUMNS": 128}  # elements per program of a cast to fp8

VERSION: str = triton.__version__


@triton.jit
def _magnitude(x):
    """Return integer bits that sort as magnitudes do, with NaN above infinity."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _raise(largest, magnitude, written):
    """Update `largest` to the maximum with `magnitude`, rounded to the type of `written`."""
    value = tl.max(magnitude, None).to(tl.float32, bitcast=True)  # rounding keeps the order
    rounded = _magnitude(value.to(written.dtype.element_ty))
    # Most programs skip the atomic, since the value is already larger: less contention.
    tl.atomic_max(largest, rounded, mask=rounded > tl.load(largest), sem="relaxed")


@triton.jit
def _swiglu(gate, up, out, largest, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    product = g * tl.sigmoid(g) * u
    tl.store(out + at, product, mask=inside)
    if largest is not None:
        _raise(largest, _magnitude(product), out)


@triton.jit
def _swiglu_backward(grad, gate, up, grad_gate, grad_up, largest, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    of_gate, of_up, product = d * u * sigmoid * (1.0 + g * (1.0 - sigmoid)), d * silu, silu * u
    tl.store(grad_up + at, of_up, mask=inside)
    tl.store(grad_gate + at, of_gate, mask=inside)
    tl.store(grad + at, product, mask=inside)
    if largest is not None:
        _raise(largest, _magnitude(of_gate), grad_gate)
        _raise(largest + 1, _magnitude(of_up), grad_up)
        _raise(largest + 2, _magnitude(product), grad)


@triton.jit
def _rotate(
    x, cos, sin, out, largest, num_rows, num_heads, half, sign,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
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
    real = first * c[None, :] - second * s[None, :]
    imaginary = second * c[None, :] + first * s[None, :]
    tl.store(out + at, real, mask=inside)
    tl.store(out + at + half, imaginary, mask=inside)
    if largest is not None:
        _raise(largest, tl.maximum(_magnitude(real), _magnitude(imaginary)), out)


@triton.jit
def _largest(x, bits, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _raise(bits, _magnitude(tl.load(x + at, mask=at < numel, other=0.0)), x)


@triton.jit
def _to_fp8(x, MANTISSA: tl.constexpr, NATIVE: tl.constexpr):
    """Round `x`, in range or NaN, to the bits of e4m3 or e5m2; ties go to even.

    Triton's interpreter does not round so: without `NATIVE` this computes with integers.
    """
    if NATIVE:
        if MANTISSA == 3:
            return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        return x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    bias: tl.constexpr = (1 << (6 - MANTISSA)) - 1
    cut: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    odd = (magnitude >> cut) & 1
    normal = (magnitude - ((127 - bias) << 23) + (1 << (cut - 1)) - 1 + odd) >> cut
    # A number whose last bit weighs as much as the last of fp8's numbers below the normal ones.
    shifter = tl.full(x.shape, (127 + 24 - bias - MANTISSA) << 23, tl.int32)
    moved = tl.abs(x) + shifter.to(tl.float32, bitcast=True)
    small = moved.to(tl.int32, bitcast=True) - shifter
    code = tl.where(magnitude < ((128 - bias) << 23), small, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _cast(
    x, bits, scale, data, transposed, num_rows, num_columns,
    TOP: tl.constexpr, TINY: tl.constexpr, MANTISSA: tl.constexpr, NATIVE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    factor = tl.div_rn(tl.load(bits).to(tl.float32, bitcast=True), TOP)
    factor = tl.where(factor < TINY, TINY, factor)  # a NaN stays
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale, factor)
    inside = (row[:, None] < num_rows) & (column[None, :] < num_columns)
    at = row[:, None] * num_columns + column[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    rounded = _to_fp8(value * tl.div_rn(1.0, factor), MANTISSA, NATIVE)
    if data is not None:
        tl.store(data + at, rounded, mask=inside)
    if transposed is not None:
        at = column[:, None] * num_rows + row[None, :]
        inside = (row[None, :] < num_rows) & (column[:, None] < num_columns)
        tl.store(transposed + at, tl.trans(rounded), mask=inside)


@triton.jit
def _norm(x, scale, y, rstd, largest, width, one_over_width, epsilon, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, inside = row * width + column, column < width
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(scale + column, mask=inside, other=0.0).to(y.dtype.element_ty).to(tl.float32)
    r = tl.rsqrt(tl.sum(v * v, 0) * one_over_width + epsilon)
    normed = v * r * s
    tl.store(rstd + row, r)
    tl.store(y + at, normed, mask=inside)
    _raise(largest, _magnitude(normed), y)


@triton.jit
def _norm_backward(
    grad, x, scale, rstd, residual, grad_x, sums, largest, num_rows, width, one_over_width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < width
    s = tl.load(scale + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    highest = tl.zeros((BLOCK,), tl.int32)
    for row in range(tl.program_id(0).to(tl.int64), num_rows, tl.num_programs(0)):
        at = row * width + column
        d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(rstd + row)
        normed = v * r
        total += d * normed
        d *= s
        along = tl.sum(d * normed, 0) * one_over_width
        of_x = r * (d - normed * along)
        if residual is not None:  # round before the addition, as the unfused norm does
            of_x = of_x.to(grad_x.dtype.element_ty).to(tl.float32)
            of_x += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        highest = tl.maximum(highest, _magnitude(of_x))
        tl.store(grad_x + at, of_x, mask=inside)
    if largest is not None:
        _raise(largest, highest, grad_x)
    tl.store(sums + tl.program_id(0) * width + column, total, mask=inside)


@triton.jit
def _cross_entropy(
    logits, labels, losses, log_norms, num_columns, z, GRADS: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * num_columns
    label = tl.load(labels + token)
    of_label = tl.load(row + label).to(tl.float32)  # now: it is replaced below
    highest = float("-inf")
    total = 0.0
    for begin in range(0, num_columns, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < num_columns, other=float("-inf")).to(tl.float32)
        above = tl.maximum(highest, tl.max(x, 0))
        total = total * tl.exp(highest - above) + tl.sum(tl.exp(x - above), 0)
        highest = above
    log_norm = highest + tl.log(total)
    tl.store(losses + token, log_norm - of_label)
    tl.store(log_norms + token, log_norm)
    if GRADS:
        for begin in range(0, num_columns, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            x = tl.load(row + at, mask=at < num_columns, other=float("-inf")).to(tl.float32)
            grad = tl.exp(x - log_norm) * (1.0 + 2.0 * z * log_norm)
            grad -= (at == label).to(tl.float32)
            tl.store(row + at, grad, mask=at < num_columns)


def norm(x_BSD: Tensor, scale_D: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Compute RMSNorm, for a cast, and 1 / the root mean square [B, S, 1] in fp32."""
    x, width = x_BSD.contiguous(), x_BSD.shape[-1]
    y, largest = torch.empty_like(x), _zeros(x)
    rstd_BS1 = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _norm[(x.numel() // width,)](
        x, scale_D, y, rstd_BS1, largest, width, 1.0 / width, epsilon, BLOCK=block, num_warps=8
    )
    _remember(largest, y)
    return y, rstd_BS1


def norm_backward(
    grad_BSD: Tensor,
    x_BSD: Tensor,
    scale_D: Tensor,
    rstd_BS1: Tensor,
    residual_BSD: Tensor | None = None,
    *,
    for_cast: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute gradients of RMSNorm's input and scale; `rstd` is forward's 1 / root mean square.

    `residual`, the gradient by way of the residual addition, is added to the input's gradient.
    """
    grad, x = grad_BSD.contiguous(), x_BSD.contiguous()
    residual = None if residual_BSD is None else residual_BSD.contiguous()
    grad_x, width, largest = torch.empty_like(x), x.shape[-1], _zeros(x) if for_cast else None
    num_rows = x.numel() // width
    programs = min(num_rows, _NORM_PROGRAMS)
    sums = torch.empty((programs, width), dtype=torch.float32, device=x.device)
    tensors, block = (grad, x, scale_D, rstd_BS1, residual, grad_x), triton.next_power_of_2(width)
    sizes = num_rows, width, 1.0 / width
    _norm_backward[(programs,)](*tensors, sums, largest, *sizes, BLOCK=block, num_warps=8)
    _remember(largest, grad_x)
    return grad_x, sums.sum(0).to(scale_D.dtype)


def _zeros(like: Tensor, count: int = 1) -> Tensor:
    """Make the bits of the largest values of `count` tensors that a kernel is to write."""
    return torch.zeros(count, dtype=torch.int32, device=like.device)


def _remember(largest: Tensor | None, *written: Tensor) -> None:
    if largest is not None:
        for tensor, its_largest in zip(written, largest, strict=True):
            remember_largest(tensor, its_largest)


def cross_entropy(
    logits_TV: Tensor, labels_T: Tensor, *, needs_grads: bool, z_weight: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return each token's loss and its logits' log-sum-exp, in fp32.

    `needs_grads` replaces logits by their gradients, of loss and `z_weight` * log-sum-exp^2.
    """
    assert logits_TV.is_contiguous()
    losses_T = torch.empty(logits_TV.shape[0], dtype=torch.float32, device=logits_TV.device)
    log_norm_T = torch.empty_like(losses_T)
    num_columns = logits_TV.shape[1]
    block = min(_LOSS_BLOCK, triton.next_power_of_2(num_columns))
    _cross_entropy[(logits_TV.shape[0],)](
        *(logits_TV, labels_T, losses_T, log_norm_T, num_columns, z_weight),
        GRADS=needs_grads,
        BLOCK=block,
        num_warps=8,
    )
    return losses_T, log_norm_T


def swiglu(gate_BSF: Tensor, up_BSF: Tensor, *, for_cast: bool = False) -> Tensor:
    """Compute `silu(gate) * up`."""
    gate, up = gate_BSF.contiguous(), up_BSF.contiguous()
    out, numel, largest = torch.empty_like(gate), gate.numel(), _zeros(gate) if for_cast else None
    _swiglu[(triton.cdiv(numel, _BLOCK),)](gate, up, out, largest, numel, BLOCK=_BLOCK)
    _remember(largest, out)
    return out


def swiglu_backward(
    grad_BSF: Tensor, gate_BSF: Tensor, up_BSF: Tensor, *, for_cast: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients of gate and up; `silu(gate) * up` replaces the contiguous `grad`."""
    assert grad_BSF.is_contiguous()
    gate, up = gate_BSF.contiguous(), up_BSF.contiguous()
    grad_gate, grad_up, numel = torch.empty_like(gate), torch.empty_like(up), gate.numel()
    largest = _zeros(gate, 3) if for_cast else None
    _swiglu_backward[(triton.cdiv(numel, _BLOCK),)](
        grad_BSF, gate, up, grad_gate, grad_up, largest, numel, BLOCK=_BLOCK
    )
    _remember(largest, grad_gate, grad_up, grad_BSF)
    return grad_gate, grad_up, grad_BSF


def rotate(
    x_BSNH: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool, for_cast: bool = False
) -> Tensor:
    """Rotate as rotary.py does; `cos` and `sin` are of all positions, or of every token."""
    x, cos, sin = x_BSNH.contiguous(), cos.contiguous(), sin.contiguous()
    *_, num_heads, channels = x.shape
    out, half, largest = torch.empty_like(x), channels // 2, _zeros(x) if for_cast else None
    heads = min(_MOST_HEADS, triton.next_power_of_2(num_heads))
    grid = (x.numel() // (num_heads * channels), triton.cdiv(num_heads, heads))
    sizes = cos.numel() // channels, num_heads, half, -1.0 if inverse else 1.0
    wide = triton.next_power_of_2(half)
    _rotate[grid](x, cos, sin, out, largest, *sizes, HEADS=heads, HALF=wide)
    _remember(largest, out)
    return out


def cast(
    tensor: Tensor, kind: torch.dtype, *, data: bool, transposed: bool, again: bool = False
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Return the tensor in fp8, its transpose [last dim, others], each if asked for, and the scale.

    `again`: backward will cast this activation once more.
    """
    tensor, limits = tensor.contiguous(), torch.finfo(kind)
    num_columns = tensor.shape[-1]
    num_rows = tensor.numel() // num_columns
    bits = known_largest(tensor)
    if bits is None:
        bits, numel, block = _zeros(tensor), tensor.numel(), _MAXIMUM_BLOCK
        _largest[(triton.cdiv(numel, block),)](tensor, bits, numel, BLOCK=block, num_warps=8)
        _remember(bits if again else None, tensor)
    scale = torch.empty((), dtype=torch.float32, device=tensor.device)
    as_is = torch.empty_like(tensor, dtype=kind) if data else None
    turned = tensor.new_empty((num_columns, num_rows), dtype=kind) if transposed else None
    grid = (triton.cdiv(num_columns, _TILE["COLUMNS"]), triton.cdiv(num_rows, _TILE["ROWS"]))
    written = (None if part is None else part.view(torch.uint8) for part in (as_is, turned))
    how = {"TOP": limits.max, "TINY": torch.finfo(torch.float32).tiny, "num_warps": 4, **_TILE}
    how["MANTISSA"] = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}[kind]
    how["NATIVE"] = tensor.device.type == "cuda"
    _cast[grid](tensor, bits, scale, *written, num_rows, num_columns, **how)
    return as_is, turned, scale
