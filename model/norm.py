"""RMSNorm, alone or shared by several matmuls or weight slices and recomputed in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from model.config import LlamaConfig
from model.fp8 import Operand
from model.matmul import input_grads


def _norm(
    x_BSD: Tensor, scale_D: Tensor, epsilon: float, *, for_cast: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute the norm and 1 / the root mean square [B, S, 1] in fp32; `for_cast`: by Triton.

    Written out for the CPU, where torch's own runs several operations and saves their results.
    """
    if for_cast:
        from model.kernels import norm

        return norm(x_BSD, scale_D, epsilon)
    if x_BSD.device.type != "cpu":
        shape, scale = (x_BSD.shape[-1],), scale_D.to(x_BSD.dtype)
        y_BSD, rstd_BS1 = torch.ops.aten._fused_rms_norm(x_BSD, shape, scale, epsilon)
        return y_BSD, rstd_BS1
    x = x_BSD.float()
    mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    rstd_BS1 = mean_square.add_(epsilon).rsqrt_()
    return (x * rstd_BS1).mul_(scale_D).to(x_BSD.dtype), rstd_BS1


def _norm_backward(
    grad_BSD: Tensor, x_BSD: Tensor, scale_D: Tensor, rstd_BS1: Tensor, needs_grad: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x and scale, each None unless `needs_grad` says so."""
    needs_x, needs_scale = needs_grad
    if x_BSD.device.type != "cpu":
        shape, scale = (x_BSD.shape[-1],), scale_D.to(x_BSD.dtype)
        grads = torch.ops.aten._fused_rms_norm_backward(
            grad_BSD, x_BSD, shape, rstd_BS1, scale, [needs_x, needs_scale]
        )
        grad_scale = grads[1].to(scale_D.dtype) if needs_scale else None
        return grads[0] if needs_x else None, grad_scale
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
        needs_grad = ctx.needs_input_grad[:2]
        return *_norm_backward(grads[0], x_BSD, scale_D, rstd_BS1, needs_grad), None


def rms_norm(x_BSD: Tensor, scale_D: Tensor, epsilon: float) -> Tensor:
    """Divide `x` by its root mean square and multiply it by `scale`, in fp32."""
    if x_BSD.device.type == "cpu" and not torch.compiler.is_compiling():
        return _RMSNorm.apply(x_BSD, scale_D, epsilon)
    return F.rms_norm(x_BSD, (x_BSD.shape[-1],), scale_D.to(x_BSD.dtype), epsilon)  # one kernel


Slices = Iterable[Callable[..., Tensor]]  # each computes a partial result with a weight slice


class SharedInput:
    """Input of several matmuls (readers), for example of weight slices, recomputed in backward.

    Forward computes the input once for all readers, and backward once more. Backward sums the
    gradients of all readers before it passes them on. From `release` to backward nothing is held.
    """

    def __init__(self, make: Callable[..., Tensor], *sources: Tensor) -> None:
        self.make = make
        self._y_BSD: Tensor | None = make(*(source.detach() for source in sources))
        self._leaves: tuple[Tensor, ...] = ()  # the sources from which backward recomputes y
        self._grad_y_TD: Tensor | None = None
        self._readers_left = 0  # number of readers whose backward has not run yet

    def release(self) -> None:
        """Free the input; call it after the forward of every reader has finished."""
        self._y_BSD = None

    def in_forward(self, *, backward_follows: bool) -> Tensor:
        assert self._y_BSD is not None, "a reader after the last"
        self._readers_left += backward_follows
        return self._y_BSD

    def in_backward(self, sources: Sequence[Tensor], needs_grads: Sequence[bool]) -> Tensor:
        """Return the input [T, D], made again if this is the first reader."""
        if not self._leaves:
            pairs = zip(sources, needs_grads, strict=True)
            self._leaves = tuple(
                source.detach().requires_grad_(requires) for source, requires in pairs
            )
            self._y_BSD = self._make_again(self._leaves)
        assert self._y_BSD is not None
        return self._y_BSD.detach().flatten(0, -2)

    def _make_again(self, leaves: Sequence[Tensor]) -> Tensor:
        with torch.enable_grad():
            return self.make(*leaves)

    def _grads(self, y_BSD: Tensor, leaves: Sequence[Tensor], grad_BSD: Tensor) -> Iterator[Tensor]:
        """Return the gradients of the leaves that need one."""
        needed = [leaf for leaf in leaves if leaf.requires_grad]
        return iter(torch.autograd.grad(y_BSD, needed, grad_BSD))

    def add_products(self, grads: Sequence[Operand], weights: Iterator[Operand]) -> None:
        """Accumulate one reader's gradient of the input, one weight at a time."""
        for grad in grads:
            self._grad_y_TD = input_grads(grad, next(weights), total_TD=self._grad_y_TD)

    def add(self, grad_TD: Tensor) -> None:
        """Accumulate one reader's gradient of the input; takes ownership of the tensor."""
        total_TD = self._grad_y_TD
        self._grad_y_TD = grad_TD if total_TD is None else total_TD.add_(grad_TD)

    def source_grads(self) -> tuple[Tensor | None, ...]:
        """Return the needed gradients of the sources after the last reader; None before."""
        self._readers_left -= 1
        leaves, y_BSD, grad_TD = self._leaves, self._y_BSD, self._grad_y_TD
        if self._readers_left or not leaves:
            return (None,) * len(leaves)
        self._leaves, self._y_BSD, self._grad_y_TD = (), None, None
        if not any(leaf.requires_grad for leaf in leaves):
            return (None,) * len(leaves)
        assert y_BSD is not None
        assert grad_TD is not None
        grads = self._grads(y_BSD, leaves, grad_TD.view_as(y_BSD))
        return tuple(next(grads) if leaf.requires_grad else None for leaf in leaves)


class SharedNorm(SharedInput):
    """`rms_norm(x, scale)`, the input of several matmuls; its sources are x and scale.

    Gradients are computed without an autograd graph; `fused`: by Triton. `for_cast`: Triton also
    finds the amax of the norm and of the gradient of x for the next cast to fp8.
    """

    def __init__(
        self, x_BSD: Tensor, scale_D: Tensor, epsilon: float, *, fused: bool, for_cast: bool = False
    ) -> None:
        self._epsilon = epsilon
        self._fused = fused
        self._for_cast = fused and for_cast
        self._rstd_BS1: Tensor | None = None
        # The gradient of x from the residual branch, to which the norm's is added.
        self.residual_BSD: Tensor | None = None
        make: Callable[..., Tensor] = partial(rms_norm, epsilon=epsilon)
        if self._for_cast:
            make = lambda x, scale: _norm(x, scale, epsilon, for_cast=True)[0]  # noqa: E731
        super().__init__(make, x_BSD, scale_D)

    def _make_again(self, leaves: Sequence[Tensor]) -> Tensor:
        x_BSD, scale_D = leaves
        y_BSD, self._rstd_BS1 = _norm(x_BSD, scale_D, self._epsilon, for_cast=self._for_cast)
        return y_BSD

    def _grads(self, y_BSD: Tensor, leaves: Sequence[Tensor], grad_BSD: Tensor) -> Iterator[Tensor]:
        rstd_BS1, self._rstd_BS1 = self._rstd_BS1, None
        assert rstd_BS1 is not None, "not made again"
        residual_BSD, self.residual_BSD = self.residual_BSD, None
        needs_grad = [leaf.requires_grad for leaf in leaves]
        args = grad_BSD, leaves[0].detach(), leaves[1].detach(), rstd_BS1
        if self._fused and all(needs_grad):
            from model.kernels import norm_backward

            return iter(norm_backward(*args, residual_BSD, for_cast=self._for_cast))
        grads = _norm_backward(*args, needs_grad)
        if grads[0] is not None and residual_BSD is not None:
            grads[0].add_(residual_BSD)
        return (grad for grad in grads if grad is not None)


def add_slices(slices: Slices, *args: Any) -> Tensor:
    """Sum the partial results of slices."""
    return reduce(torch.add, (run(*args) for run in slices))


def add_slices_after(
    slices: Slices, norm_D: Tensor, config: LlamaConfig, x_BSD: Tensor, *args: Any
) -> Tensor:
    """Return the sum of the partial results of slices that share the norm of their input."""
    shared = SharedNorm(x_BSD, norm_D, config.norm_epsilon, fused=config.fuses_norms)
    out_BSD = add_slices(slices, x_BSD, *args, shared)
    shared.release()
    return out_BSD
