"""Linear layers, alone and after a norm or a gate, that save only their inputs."""

# Results between two matmuls (norms, silu(gate) * up) are cheap to compute and large to save, so
# backward recomputes them. Saved for backward of a block, in elements per token:
#
#     x, q, k, v, attention's output, x + attention, gate, up       2 D + (2 N + 2 K) H + 2 F
#
# and attention's log-sum-exp, one fp32 number per query head.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from model.fp8 import NO_CACHE, Fp8, Fp8Tensor, Operand, cached_cast, fp8_cache_of, operand
from model.matmul import input_grads, outputs, sink_of, weight_grad
from model.norm import SharedNorm

# Frozen weights may have another type than activations. A matmul converts such a weight only while
# the matmul runs; the weight is saved for backward in its own type.


def checkpointed(function: Callable[..., Any], *args: object) -> Any:
    """Call the function; backward calls it again instead of saving activations."""
    # Dropout is a hash, so there is no random generator state to save.
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


class _NormedLinears(torch.autograd.Function):
    """Linear layers after a norm; of the activations only the norm's input is saved."""

    @staticmethod
    def forward(
        ctx: Any,
        norm: SharedNorm,
        fp8: Fp8 | None,
        passes_x: bool,
        x_BSD: Tensor,
        scale_D: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x_BSD, scale_D, *weights)
        ctx.norm, ctx.fp8, ctx.passes_x = norm, fp8, passes_x
        ctx.sinks = [*map(sink_of, weights)]
        ctx.caches = [*map(fp8_cache_of, weights)]
        y_BSD = norm.in_forward(backward_follows=any(ctx.needs_input_grad))
        y = operand(y_BSD, fp8)
        made = (
            outputs(y, cache.operand(weight, y_BSD.dtype, fp8, transposed=False))
            for weight, cache in zip(weights, ctx.caches, strict=True)
        )
        return (x_BSD, *made) if passes_x else tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_BSD, scale_D, *weights = ctx.saved_tensors
        _, _, _, needs_x, needs_scale, *needs_weights = ctx.needs_input_grad
        if ctx.passes_x:
            ctx.norm.residual_BSD = grads[0]
            grads = grads[1:]
        y_TD = ctx.norm.in_backward((x_BSD, scale_D), (needs_x, needs_scale))
        needs_y = needs_x or needs_scale
        flat_grads = [
            operand(grad.flatten(0, -2), ctx.fp8, is_grad=True, data=needs_y, transposed=needed)
            for grad, needed in zip(grads, needs_weights, strict=True)
        ]
        y = operand(y_TD, ctx.fp8, data=False, transposed=True) if any(needs_weights) else y_TD
        grad_weights = [
            weight_grad(grad, y, sink) if needed else None
            for grad, needed, sink in zip(flat_grads, needs_weights, ctx.sinks, strict=True)
        ]
        if needs_y:
            cast = (
                cache.operand(weight, y_TD.dtype, ctx.fp8, transposed=True)
                for weight, cache in zip(weights, ctx.caches, strict=True)
            )
            ctx.norm.add_products(flat_grads, cast)
        del y, y_TD
        return None, None, None, *ctx.norm.source_grads(), *grad_weights


def normed_linears(
    norm: SharedNorm,
    x_BSD: Tensor,
    scale_D: Tensor,
    *weights: Tensor,
    fp8: Fp8 | None = None,
    passes_x: bool = False,
) -> tuple[Tensor, ...]:
    """Compute `norm(x) @ weight.T` for each weight; of the activations only `x` is saved.

    `norm` is the `SharedNorm` of `x` and `scale`, which other slices of the weights may share.
    `passes_x`: the first result is `x`, for the residual addition. The residual's gradient is then
    added by the kernel that computes the norm's gradient.
    """
    if torch.compiler.is_compiling():
        y_BSD = checkpointed(norm.make, x_BSD, scale_D)
        made = tuple(linear(y_BSD, weight, fp8) for weight in weights)
        return (x_BSD, *made) if passes_x else made
    return _NormedLinears.apply(norm, fp8, passes_x, x_BSD, scale_D, *weights)


def gated(gate_BSF: Tensor, up_BSF: Tensor) -> Tensor:
    """Return the input of SwiGLU's last projection."""
    return F.silu(gate_BSF) * up_BSF


class _GatedLinear(torch.autograd.Function):
    """Linear layer of `silu(gate) * up` that saves gate and up, not the product."""

    @staticmethod
    def forward(
        ctx: Any, gate_BSF: Tensor, up_BSF: Tensor, weight_DF: Tensor, fp8: Fp8 | None, fused: bool
    ) -> Tensor:
        ctx.save_for_backward(gate_BSF, up_BSF, weight_DF)
        ctx.fp8, ctx.fused = fp8, fused
        ctx.sink, ctx.cache = sink_of(weight_DF), fp8_cache_of(weight_DF)
        if fused:
            from model.kernels import swiglu

            hidden_BSF = swiglu(gate_BSF, up_BSF, for_cast=bool(fp8 and fp8.fused))
        else:
            hidden_BSF = F.silu(gate_BSF).mul_(up_BSF)
        weight = ctx.cache.operand(weight_DF, gate_BSF.dtype, fp8, transposed=False)
        return outputs(operand(hidden_BSF, fp8), weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate_BSF, up_BSF, weight_DF = ctx.saved_tensors
        needs_gate, needs_up, needs_weight, *_ = ctx.needs_input_grad
        fp8, needs_hidden = ctx.fp8, needs_gate or needs_up
        flat_TD = grads[0].flatten(0, -2)
        grad = operand(flat_TD, fp8, is_grad=True, data=needs_hidden, transposed=needs_weight)

        def hidden_grad() -> Tensor:
            weight = ctx.cache.operand(weight_DF, gate_BSF.dtype, fp8, transposed=True)
            return input_grads(grad, weight).view_as(gate_BSF)

        def grad_of_weight(hidden_BSF: Tensor) -> Tensor | None:
            hidden = operand(hidden_BSF.flatten(0, -2), fp8, data=False, transposed=True)
            return weight_grad(grad, hidden, ctx.sink)

        grad_gate = grad_up = grad_weight = None
        if ctx.fused and needs_gate and needs_up:
            from model.kernels import swiglu_backward

            grad_gate, grad_up, hidden_BSF = swiglu_backward(
                hidden_grad(), gate_BSF, up_BSF, for_cast=bool(fp8 and fp8.fused)
            )
            if needs_weight:
                grad_weight = grad_of_weight(hidden_BSF)
            return grad_gate, grad_up, grad_weight, None, None
        silu_BSF = F.silu(gate_BSF)
        if needs_weight:
            grad_weight = grad_of_weight(silu_BSF * up_BSF)
        if needs_hidden:
            grad_BSF = hidden_grad()
            grad_up = silu_BSF.mul_(grad_BSF) if needs_up else None
            if needs_gate:
                grad_gate = torch.ops.aten.silu_backward(grad_BSF.mul_(up_BSF), gate_BSF)
        return grad_gate, grad_up, grad_weight, None, None


def gated_linear(
    gate_BSF: Tensor, up_BSF: Tensor, weight_DF: Tensor, fp8: Fp8 | None = None, *, fused: bool
) -> Tensor:
    """Compute SwiGLU's second half, `(silu(gate) * up) @ weight.T`; `fused`: partly by Triton."""
    if torch.compiler.is_compiling():
        return linear(checkpointed(gated, gate_BSF, up_BSF), weight_DF, fp8)
    return _GatedLinear.apply(gate_BSF, up_BSF, weight_DF, fp8, fused)


class _Linear(torch.autograd.Function):
    """Linear layer that saves its weight and, if the weight trains, its input."""

    @staticmethod
    def forward(
        ctx: Any, x_BSD: Tensor, weight_ED: Tensor, fp8: Fp8 | None, *cached: Tensor
    ) -> Tensor:
        """Multiply; `cached`: the tensors of `cached_cast`, in a compiled graph."""
        needed_x = x_BSD if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(needed_x, weight_ED, *cached)
        ctx.fp8, ctx.sink = fp8, sink_of(weight_ED)
        ctx.cache = NO_CACHE if torch.compiler.is_compiling() else fp8_cache_of(weight_ED)
        weight = _Linear.weight(ctx, x_BSD, weight_ED, cached, transposed=False)
        return outputs(operand(x_BSD, fp8, again=needed_x is not None), weight)

    @staticmethod
    def weight(
        ctx: Any, x: Tensor, weight_ED: Tensor, cached: Sequence[Tensor], *, transposed: bool
    ) -> Operand:
        """Return the weight for a matmul with `x`."""
        if cached:
            data, turned, scale = cached
            return Fp8Tensor(data, turned, scale, x.dtype)
        return ctx.cache.operand(weight_ED, x.dtype, ctx.fp8, transposed=transposed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_BSD, weight_ED, *cached = ctx.saved_tensors
        grad_BSE, fp8, needs_x = grads[0], ctx.fp8, ctx.needs_input_grad[0]
        needs_weight = x_BSD is not None
        flat_TE = grad_BSE.flatten(0, -2)
        grad = operand(flat_TE, fp8, is_grad=True, data=needs_x, transposed=needs_weight)
        grad_x = grad_weight = None
        if needs_x:
            weight = _Linear.weight(ctx, grad_BSE, weight_ED, cached, transposed=True)
            grad_x = input_grads(grad, weight).unflatten(0, grad_BSE.shape[:-1])
        if needs_weight:
            x = operand(x_BSD.flatten(0, -2), fp8, data=False, transposed=True)
            grad_weight = weight_grad(grad, x, ctx.sink)
        return grad_x, grad_weight, None, *(None for _ in cached)


_LEAF = torch.zeros((), device="cpu", requires_grad=True)  # see `write_weight_grad` in matmul.py


class _NumberedLinear(torch.autograd.Function):
    """Linear layer in a compiled graph: backward writes the weight's gradient into its sink."""

    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, weight_ED: Tensor, number: Tensor, _: Tensor) -> Tensor:
        ctx.save_for_backward(x_BSD, weight_ED, number)
        return F.linear(x_BSD, weight_ED)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, Tensor]:
        x_BSD, weight_ED, number = ctx.saved_tensors
        grad_BSE = grads[0]
        grad_x = grad_BSE @ weight_ED if ctx.needs_input_grad[0] else None
        flat = grad_BSE.flatten(0, -2), x_BSD.flatten(0, -2)
        return grad_x, None, None, torch.ops.paro.write_weight_grad(*flat, number)


def linear(x_BSD: Tensor, weight_ED: Tensor, fp8: Fp8 | None = None) -> Tensor:
    """Compute `x @ weight.T`; a weight of another type than `x` is frozen."""
    if fp8 is None and torch.compiler.is_compiling():
        number = getattr(weight_ED, "sink_number", None)
        if number is not None:
            return _NumberedLinear.apply(x_BSD, weight_ED, number, _LEAF)
        return F.linear(x_BSD, weight_ED.to(x_BSD.dtype))
    if fp8 is None and x_BSD.dtype == weight_ED.dtype and sink_of(weight_ED) is None:
        return F.linear(x_BSD, weight_ED)
    cached = cached_cast(weight_ED) if torch.compiler.is_compiling() else ()
    return _Linear.apply(x_BSD, weight_ED, fp8, *cached)
