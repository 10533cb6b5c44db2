"""RMSNorm, and linear layers after a norm or a gate, that save only their inputs."""

# What is computed between two matmuls is cheap to compute and large to keep, so backward recomputes
# it. For a block autograd keeps neither normalized inputs nor the product of gate and up, only
#
#     x, q, k, v, attention's output, x + attention, gate, up       2 D + (2 N + 2 K) H + 2 F
#
# elements per token, and attention's log-sum-exp, one fp32 number per query head.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from model.fp8 import Fp8, Operand, casts_of, operand, weight_operand
from model.matmul import input_grads, outputs, sink_of, weight_grad, weight_grad_to_number

# Frozen weights may have another type than activations: a matmul converts one for as long as it
# runs, and what is saved for backward is the weight as it is held.


def _norm(x_BSD: Tensor, scale_D: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The norm, and 1 / the root mean square [B, S, 1] in fp32.

    Written out for the CPU, where torch's own runs several operations and saves their results.
    """
    x = x_BSD.float()
    mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    rstd_BS1 = mean_square.add_(epsilon).rsqrt_()
    return (x * rstd_BS1).mul_(scale_D).to(x_BSD.dtype), rstd_BS1


def _norm_backward(
    grad_BSD: Tensor,
    x_BSD: Tensor,
    scale_D: Tensor,
    rstd_BS1: Tensor,
    needed: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and scale that are `needed`."""
    needs_x, needs_scale = needed
    hidden, rstd_T = scale_D.numel(), rstd_BS1.flatten()
    product_TD = (grad_BSD.float() * x_BSD).view(-1, hidden)
    along_T = torch.mv(product_TD, scale_D.float()).mul_(rstd_T**3).div_(-hidden)
    grad_x = grad_scale = None
    if needs_scale:
        grad_scale = torch.mv(product_TD.t(), rstd_T).to(scale_D.dtype)
    del product_TD  # before another tensor of its size is allocated
    if needs_x:
        grad_x = (grad_BSD * scale_D.float()).mul_(rstd_BS1)
        grad_x = grad_x.addcmul_(x_BSD, along_T.view_as(rstd_BS1)).to(x_BSD.dtype)
    return grad_x, grad_scale


class _RMSNorm(torch.autograd.Function):
    """RMSNorm for the CPU."""

    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, scale_D: Tensor, epsilon: float) -> Tensor:
        y_BSD, rstd_BS1 = _norm(x_BSD, scale_D, epsilon)
        ctx.save_for_backward(x_BSD, scale_D, rstd_BS1)
        return y_BSD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_BSD, scale_D, rstd_BS1 = ctx.saved_tensors
        needed = ctx.needs_input_grad[:2]
        return *_norm_backward(grads[0], x_BSD, scale_D, rstd_BS1, needed), None


def rms_norm(x_BSD: Tensor, scale_D: Tensor, epsilon: float) -> Tensor:
    """`x` divided by its root mean square, times `scale`; computed in fp32."""
    if x_BSD.device.type == "cpu" and not torch.compiler.is_compiling():
        out: Tensor = _RMSNorm.apply(x_BSD, scale_D, epsilon)
        return out
    return F.rms_norm(x_BSD, (x_BSD.shape[-1],), scale_D.to(x_BSD.dtype), epsilon)  # one kernel


class SharedInput:
    """What several matmuls read, for example slices of weights, and backward makes again.

    It is computed once for all of them, and once more in backward, which sums the gradients of all
    readers before it passes them on. Between `release` and backward this object keeps nothing.
    """

    def __init__(self, make: Callable[..., Tensor], *sources: Tensor) -> None:
        self.make = make
        self._y_BSD: Tensor | None = make(*(source.detach() for source in sources))
        self._leaves: tuple[Tensor, ...] = ()  # what y is made from, in backward
        self._grad_y_TD: Tensor | None = None
        self._readers_left = 0  # whose backward has not run yet

    @property
    def num_columns(self) -> int:
        """D, before `release`."""
        assert self._y_BSD is not None, "released"
        return self._y_BSD.shape[-1]

    def release(self) -> None:
        """Frees the input; call it after the forward of every reader has finished."""
        self._y_BSD = None

    def in_forward(self, *, backward_follows: bool) -> Tensor:
        assert self._y_BSD is not None, "a reader after the last"
        self._readers_left += backward_follows
        return self._y_BSD

    def in_backward(self, sources: Sequence[Tensor], needs_grads: Sequence[bool]) -> Tensor:
        """The input [T, D], made again if this is the first reader."""
        if not self._leaves:
            pairs = zip(sources, needs_grads, strict=True)
            self._leaves = tuple(source.detach().requires_grad_(needed) for source, needed in pairs)
            self._y_BSD = self._make_again(self._leaves)
        assert self._y_BSD is not None
        return self._y_BSD.detach().flatten(0, -2)

    def _make_again(self, leaves: Sequence[Tensor]) -> Tensor:
        with torch.enable_grad():
            return self.make(*leaves)

    def _grads(self, y_BSD: Tensor, leaves: Sequence[Tensor], grad_BSD: Tensor) -> Iterator[Tensor]:
        """The gradients of the leaves that need one."""
        needed = [leaf for leaf in leaves if leaf.requires_grad]
        return iter(torch.autograd.grad(y_BSD, needed, grad_BSD))

    def add_products(self, grads: Sequence[Operand], weights: Iterator[Operand]) -> None:
        """Accumulates one reader's gradient of the input; weights live one at a time."""
        for grad in grads:
            self._grad_y_TD = input_grads(grad, next(weights), total_TD=self._grad_y_TD)

    def add(self, grad_TD: Tensor) -> None:
        """Accumulates one reader's gradient of the input, which is this object's from now on."""
        total_TD = self._grad_y_TD
        self._grad_y_TD = grad_TD if total_TD is None else total_TD.add_(grad_TD)

    def source_grads(self) -> tuple[Tensor | None, ...]:
        """Gradients of the sources, as far as needed, after the last reader; None before."""
        self._readers_left -= 1
        leaves, y_BSD, grad_TD = self._leaves, self._y_BSD, self._grad_y_TD
        if self._readers_left or not leaves:
            return (None,) * len(leaves)
        self._leaves, self._y_BSD, self._grad_y_TD = (), None, None
        if not any(leaf.requires_grad for leaf in leaves):
            return (None,) * len(leaves)
        assert y_BSD is not None
        assert grad_TD is not None
        found = self._grads(y_BSD, leaves, grad_TD.view_as(y_BSD))
        return tuple(next(found) if leaf.requires_grad else None for leaf in leaves)


class _SharedNorm(SharedInput):
    """A norm on the CPU, whose gradients need no graph of their own."""

    def __init__(self, x_BSD: Tensor, scale_D: Tensor, epsilon: float) -> None:
        self._epsilon = epsilon
        self._rstd_BS1: Tensor | None = None
        super().__init__(partial(rms_norm, epsilon=epsilon), x_BSD, scale_D)

    def _make_again(self, leaves: Sequence[Tensor]) -> Tensor:
        y_BSD, self._rstd_BS1 = _norm(leaves[0], leaves[1], self._epsilon)
        return y_BSD

    def _grads(self, y_BSD: Tensor, leaves: Sequence[Tensor], grad_BSD: Tensor) -> Iterator[Tensor]:
        rstd_BS1, self._rstd_BS1 = self._rstd_BS1, None
        assert rstd_BS1 is not None, "not made again"
        needed = [leaf.requires_grad for leaf in leaves]
        found = _norm_backward(grad_BSD, leaves[0], leaves[1], rstd_BS1, needed)
        return (grad for grad in found if grad is not None)


def shared_norm(x_BSD: Tensor, scale_D: Tensor, epsilon: float) -> SharedInput:
    """`rms_norm(x, scale)`, the input of several matmuls; its sources are x and scale."""
    if x_BSD.device.type == "cpu":
        return _SharedNorm(x_BSD, scale_D, epsilon)
    return SharedInput(partial(rms_norm, epsilon=epsilon), x_BSD, scale_D)


class _NormedLinears(torch.autograd.Function):
    """Saves the input and recomputes its norm in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        norm: SharedInput,
        fp8: Fp8 | None,
        x_BSD: Tensor,
        scale_D: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x_BSD, scale_D, *weights)
        ctx.norm, ctx.fp8, ctx.sinks = norm, fp8, [*map(sink_of, weights)]
        ctx.casts = [*map(casts_of, weights)]
        y_BSD = norm.in_forward(backward_follows=any(ctx.needs_input_grad))
        y = operand(y_BSD, fp8)
        return tuple(
            outputs(y, weight_operand(weight, y_BSD.dtype, fp8, casts, transposed=False))
            for weight, casts in zip(weights, ctx.casts, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_BSD, scale_D, *weights = ctx.saved_tensors
        _, _, needs_x, needs_scale, *needs_weights = ctx.needs_input_grad
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
                weight_operand(weight, y_TD.dtype, ctx.fp8, casts, transposed=True)
                for weight, casts in zip(weights, ctx.casts, strict=True)
            )
            ctx.norm.add_products(flat_grads, cast)
        del y, y_TD
        return None, None, *ctx.norm.source_grads(), *grad_weights


def normed_linears(
    norm: SharedInput,
    x_BSD: Tensor,
    scale_D: Tensor,
    *weights: Tensor,
    fp8: Fp8 | None = None,
) -> tuple[Tensor, ...]:
    """`norm(x) @ weight.T` for each weight; of the activations only `x` is saved for backward.

    `norm` is `shared_norm` of `x` and `scale`, which other slices of the weights may share.
    """
    if torch.compiler.is_compiling():
        y_BSD = _made_again(norm.make, x_BSD, scale_D)
        return tuple(linear(y_BSD, weight, fp8) for weight in weights)
    outputs: tuple[Tensor, ...] = _NormedLinears.apply(norm, fp8, x_BSD, scale_D, *weights)
    return outputs


def _made_again(make: Callable[..., Tensor], *sources: Tensor) -> Tensor:
    """What a graph of torch.compile makes of the sources, and again in backward."""
    out: Tensor = checkpoint(make, *sources, use_reentrant=False, preserve_rng_state=False)
    return out


def gated(gate_BSF: Tensor, up_BSF: Tensor) -> Tensor:
    """The input of SwiGLU's last projection."""
    return F.silu(gate_BSF) * up_BSF


class _GatedLinear(torch.autograd.Function):
    """Saves gate and up and recomputes their product in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        gate_BSF: Tensor,
        up_BSF: Tensor,
        weight_DF: Tensor,
        fp8: Fp8 | None,
        fused: bool,
    ) -> Tensor:
        ctx.save_for_backward(gate_BSF, up_BSF, weight_DF)
        ctx.fp8, ctx.sink, ctx.casts, ctx.fused = (
            fp8,
            sink_of(weight_DF),
            casts_of(weight_DF),
            fused,
        )
        if fused:
            from model.kernels import swiglu

            hidden_BSF = swiglu(gate_BSF, up_BSF)
        else:
            hidden_BSF = F.silu(gate_BSF).mul_(up_BSF)
        weight = weight_operand(weight_DF, gate_BSF.dtype, fp8, ctx.casts, transposed=False)
        return outputs(operand(hidden_BSF, fp8), weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate_BSF, up_BSF, weight_DF = ctx.saved_tensors
        needs_gate, needs_up, needs_weight, *_ = ctx.needs_input_grad
        fp8, needs_hidden = ctx.fp8, needs_gate or needs_up
        flat_TD = grads[0].flatten(0, -2)
        grad = operand(flat_TD, fp8, is_grad=True, data=needs_hidden, transposed=needs_weight)

        def hidden_grad() -> Tensor:
            weight = weight_operand(weight_DF, gate_BSF.dtype, fp8, ctx.casts, transposed=True)
            return input_grads(grad, weight).view_as(gate_BSF)

        def grad_of_weight(hidden_BSF: Tensor) -> Tensor | None:
            hidden = operand(hidden_BSF.flatten(0, -2), fp8, data=False, transposed=True)
            return weight_grad(grad, hidden, ctx.sink)

        grad_gate = grad_up = grad_weight = None
        if ctx.fused and needs_gate and needs_up:
            from model.kernels import swiglu_backward

            grad_gate, grad_up, hidden_BSF = swiglu_backward(hidden_grad(), gate_BSF, up_BSF)
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
    gate_BSF: Tensor,
    up_BSF: Tensor,
    weight_DF: Tensor,
    fp8: Fp8 | None = None,
    *,
    fused: bool = False,
) -> Tensor:
    """SwiGLU's second half: `(silu(gate) * up) @ weight.T`; `fused`: the product by Triton."""
    if torch.compiler.is_compiling():
        return linear(_made_again(gated, gate_BSF, up_BSF), weight_DF, fp8)
    out: Tensor = _GatedLinear.apply(gate_BSF, up_BSF, weight_DF, fp8, fused)
    return out


class _Linear(torch.autograd.Function):
    """Saves the input, if the weight trains, and the weight in its own type."""

    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, weight_ED: Tensor, fp8: Fp8 | None) -> Tensor:
        needed_x = x_BSD if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(needed_x, weight_ED)
        ctx.fp8, ctx.sink, ctx.casts = fp8, sink_of(weight_ED), casts_of(weight_ED)
        weight = weight_operand(weight_ED, x_BSD.dtype, fp8, ctx.casts, transposed=False)
        return outputs(operand(x_BSD, fp8), weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_BSD, weight_ED = ctx.saved_tensors
        grad_BSE, fp8, needs_x = grads[0], ctx.fp8, ctx.needs_input_grad[0]
        needs_weight = x_BSD is not None
        flat_TE = grad_BSE.flatten(0, -2)
        grad = operand(flat_TE, fp8, is_grad=True, data=needs_x, transposed=needs_weight)
        grad_x = grad_weight = None
        if needs_x:
            weight = weight_operand(weight_ED, grad_BSE.dtype, fp8, ctx.casts, transposed=True)
            grad_x = input_grads(grad, weight).unflatten(0, grad_BSE.shape[:-1])
        if needs_weight:
            x = operand(x_BSD.flatten(0, -2), fp8, data=False, transposed=True)
            grad_weight = weight_grad(grad, x, ctx.sink)
        return grad_x, grad_weight, None


_LEAF = torch.zeros((), device="cpu", requires_grad=True)  # see `weight_grad_to_number`


class _NumberedLinear(torch.autograd.Function):
    """In a graph: the weight's gradient goes to its sink, and the graph returns none."""

    @staticmethod
    def forward(
        ctx: Any, x_BSD: Tensor, weight_ED: Tensor, number: Tensor, _leaf: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x_BSD, weight_ED, number)
        return F.linear(x_BSD, weight_ED)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, Tensor]:
        x_BSD, weight_ED, number = ctx.saved_tensors
        grad_BSE = grads[0]
        grad_x = grad_BSE @ weight_ED if ctx.needs_input_grad[0] else None
        flat = grad_BSE.flatten(0, -2), x_BSD.flatten(0, -2)
        return grad_x, None, None, weight_grad_to_number(*flat, number)


def linear(x_BSD: Tensor, weight_ED: Tensor, fp8: Fp8 | None = None) -> Tensor:
    """`x @ weight.T`; a weight of another type than `x` is frozen."""
    if fp8 is None and torch.compiler.is_compiling():
        number = getattr(weight_ED, "sink_number", None)
        if number is not None:
            made: Tensor = _NumberedLinear.apply(x_BSD, weight_ED, number, _LEAF)
            return made
        return F.linear(x_BSD, weight_ED.to(x_BSD.dtype))
    if fp8 is None and x_BSD.dtype == weight_ED.dtype and sink_of(weight_ED) is None:
        return F.linear(x_BSD, weight_ED)
    out: Tensor = _Linear.apply(x_BSD, weight_ED, fp8)
    return out
