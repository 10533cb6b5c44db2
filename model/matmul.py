"""Matmuls of a block's linear layers: in the type of their operands, or in fp8."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from model.config import BF16_CAPABILITY, FP8_CAPABILITY, Fp8Format, matmul_writes
from model.fp8 import Fp8Tensor, Operand
from paro.errors import UserError


def check_matmul_types(fp8: Fp8Format | None, dtype: torch.dtype, device: torch.device) -> None:
    """Raise `UserError` if the GPU has no matmuls in the requested fp8 or bf16."""
    if device.type != "cuda":
        return
    major, minor = torch.cuda.get_device_capability(device)
    has = f"{torch.cuda.get_device_name(device)} has {major}.{minor}"
    if fp8 is not None and (major, minor) < FP8_CAPABILITY:
        raise UserError(
            f"--fp8-format {fp8} needs a GPU of compute capability 8.9 or newer, and {has}: leave "
            "it out"
        )
    if dtype == torch.bfloat16 and (major, minor) < BF16_CAPABILITY:
        raise UserError(
            f"--bf16 needs a GPU of compute capability 8.0 or newer, and {has}: give --fp16; "
            "attention has no FlashAttention there and is slower"
        )


def outputs(x: Operand, weight: Operand) -> Tensor:
    """Compute `x @ weight.T`, for x [..., D] and weight [E, D]."""
    if isinstance(x, Tensor):
        assert isinstance(weight, Tensor)
        return F.linear(x, weight)
    assert isinstance(weight, Fp8Tensor)
    flat = _product(x, x.values.flatten(0, -2), weight, weight.values, fast=True)
    # Not a view, to which autograd would allow no addition in place: of a bias, for example.
    return torch.ops.aten._unsafe_view(flat, [*x.values.shape[:-1], flat.shape[-1]])


def input_grads(grad: Operand, weight: Operand, *, total_TD: Tensor | None = None) -> Tensor:
    """Compute `grad @ weight`, for grad [T, E] and weight [E, D]; add to `total_TD` if given."""
    if isinstance(grad, Tensor):
        assert isinstance(weight, Tensor)
        if total_TD is not None:
            return torch.addmm(total_TD, grad, weight, out=total_TD)
        return grad @ weight
    assert isinstance(weight, Fp8Tensor)
    product_TD = _product(grad, grad.values, weight, weight.values_t)
    return product_TD if total_TD is None else total_TD.add_(product_TD)


class GradSink(ABC):
    """A sharding engine's buffer for a weight's gradient, in the weight's attribute `grad_sink`.

    A weight with a sink is used once in a forward.
    """

    @abstractmethod
    def open(self) -> tuple[Tensor, bool]:
        """Return the gradient buffer, and whether to add to its values or replace them."""

    @abstractmethod
    def close(self) -> None:
        """Mark the gradient in the buffer as complete."""

    def take(self, leaf: Tensor) -> None:
        """Move a leaf's `.grad`, if any, into the buffer; a post-accumulate-grad hook."""
        grad, leaf.grad = leaf.grad, None
        if grad is not None:  # otherwise a matmul has written the gradient into the buffer
            into, adds = self.open()
            store_grad(grad, into, adds=adds)
            self.close()


# Number: weight with a sink. A compiled graph that serves all blocks takes numbers as inputs;
# a Python object would become a constant of the graph.
_NUMBERED: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
_NUMBERS = itertools.count()


def number_weights(weights: Iterable[Tensor]) -> None:
    """Set `sink_number` on each weight that has a sink; delete it from other weights."""
    for weight in weights:
        numbered = hasattr(weight, "sink_number")
        if sink_of(weight) is None:
            if numbered:
                del weight.sink_number  # type: ignore[attr-defined]
        elif not numbered:
            number = next(_NUMBERS)
            _NUMBERED[number] = weight
            weight.sink_number = torch.tensor(number, device="cpu")  # type: ignore[attr-defined]


def sink_of(weight: Tensor) -> GradSink | None:
    if torch.compiler.is_compiling():
        return None
    return getattr(weight, "grad_sink", None)


def weight_grad(grad: Operand, x: Operand, sink: GradSink | None = None) -> Tensor | None:
    """Compute `grad.T @ x`, for grad [T, E] and x [T, D]; None if a sink has taken it."""
    if sink is None:
        return _weight_grad(grad, x)
    into_ED, adds = sink.open()
    write_weight_grad(grad, x, into_ED, adds=adds)
    sink.close()
    return None


# Registered without `custom_op`, whose overhead doubles the time of a call besides the matmul.
_WRITE = "paro::write_weight_grad"
torch.library.define(_WRITE, "(Tensor grad, Tensor x, Tensor number) -> Tensor")


# Computes `weight_grad` into the sink of this number, in a graph, and returns 0 on the CPU. The 0
# has to be the gradient of some leaf: a compiler drops a call whose result is unused.
@torch.library.impl(_WRITE, "default")
def _write(grad_TE: Tensor, x_TD: Tensor, number: Tensor) -> Tensor:
    weight_grad(grad_TE, x_TD, sink_of(_NUMBERED[int(number)]))
    return torch.zeros((), device="cpu")


@torch.library.register_fake(_WRITE)
def _nothing(_grad: Tensor, _x: Tensor, _number: Tensor) -> Tensor:
    return torch.zeros((), device="cpu")


def write_weight_grad(grad: Operand, x: Operand, into_ED: Tensor, *, adds: bool) -> None:
    """Compute `weight_grad` into a buffer: replace the buffer's values, or `adds` to them."""
    sizes = into_ED.dtype.itemsize, grad.dtype.itemsize
    if isinstance(grad, Tensor) and matmul_writes(*sizes, into_ED.device.type):
        assert isinstance(x, Tensor)
        options: dict[str, Any] = {}
        if into_ED.dtype != grad.dtype:
            options["out_dtype"] = into_ED.dtype
        if adds:
            torch.addmm(into_ED, grad.t(), x, out=into_ED, **options)
        else:
            torch.mm(grad.t(), x, out=into_ED, **options)
    else:
        store_grad(_weight_grad(grad, x), into_ED, adds=adds)


def store_grad(grad: Tensor, into: Tensor, *, adds: bool) -> None:
    """Replace the buffer's values by the gradient, or `adds` it to them."""
    if adds:
        into.add_(grad)
    else:
        into.copy_(grad)


def _weight_grad(grad: Operand, x: Operand) -> Tensor:
    if isinstance(grad, Tensor):
        assert isinstance(x, Tensor)
        return grad.t() @ x
    assert isinstance(x, Fp8Tensor)
    return _product(grad, grad.values_t, x, x.values_t)


def _product(
    left: Fp8Tensor, left_MK: Tensor, right: Fp8Tensor, right_NK: Tensor, *, fast: bool = False
) -> Tensor:
    """Multiply two matrices in fp8 to [M, N].

    `fast`: a GPU accumulates with fewer bits than fp32. Only forward uses it: errors of gradients
    would accumulate from block to block. CPUs ignore it.
    """
    return torch._scaled_mm(
        left_MK,
        right_NK.t(),
        scale_a=left.scale,
        scale_b=right.scale,
        out_dtype=left.dtype,
        use_fast_accum=fast,
    )
