"""Casts operands of matmuls to fp8; weights are cast once while their values stay."""

# [Note: fp8]
# The recipe is Megatron's "tensorwise": every operand is rounded to 8 bits with one scale, from the
# largest absolute value of this very tensor, so there is no state to keep between steps. e4m3 has 3
# bits of mantissa, e5m2 the range that gradients may need: "hybrid" takes it for gradients, "e4m3"
# does not. Sums are fp32 and results have the operands' former type, so parameters, gradients,
# masters and messages are as without fp8. An operand that is not finite makes the scale so, and all
# results NaN: the step is skipped, as without fp8.

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.config import Fp8Format

_FOR_VALUES = torch.float8_e4m3fn
_FOR_GRADS = {"e4m3": torch.float8_e4m3fn, "hybrid": torch.float8_e5m2}


class Fp8(NamedTuple):
    """How operands of matmuls are cast."""

    format: Fp8Format
    fused: bool = False  # by Triton


class Scaled(NamedTuple):
    """A tensor in fp8, `data * scale`, with what the matmuls that follow read of it.

    A GPU's fp8 units read both operands along the dim that is summed over, hence transposes.
    """

    data: Tensor | None
    transposed: Tensor | None  # [last dim, others], contiguous
    scale: Tensor  # fp32, no dims
    dtype: torch.dtype  # that it had, and that results have

    @property
    def values(self) -> Tensor:
        assert self.data is not None, "cast for a matmul that reads its transpose"
        return self.data

    @property
    def values_t(self) -> Tensor:
        assert self.transposed is not None, "cast for a matmul that reads it as it is"
        return self.transposed


Operand = Tensor | Scaled


def operand(
    tensor: Tensor,
    fp8: Fp8 | None,
    *,
    is_grad: bool = False,
    data: bool = True,
    transposed: bool = False,
    again: bool = False,
) -> Operand:
    """Return the tensor as matmuls take it: unchanged without fp8.

    `outputs` reads `data` of both operands, `input_grads` data of the gradient and the weight
    `transposed`, `weight_grad` both transposed. `again`: an activation that backward casts too.
    """
    if fp8 is None:
        return tensor
    kind = _FOR_GRADS[fp8.format] if is_grad else _FOR_VALUES
    if fp8.fused:
        from model.kernels import cast

        made = cast(tensor, kind, data=data, transposed=transposed, again=again)
        return Scaled(*made, tensor.dtype)
    cast_as_is, scale = _cast(tensor, kind)
    turned = cast_as_is.flatten(0, -2).t().contiguous() if transposed else None
    return Scaled(cast_as_is if data else None, turned, scale, tensor.dtype)


def _cast(tensor: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    limits = torch.finfo(kind)
    # Not a number: by one, a GPU multiplies with its rounded reciprocal instead of dividing.
    top = torch.full((), limits.max, dtype=torch.float32, device=tensor.device)
    # Zeros alone would have scale 0; values so small that 1 / scale overflowed become 0.
    scale = (tensor.abs().amax().float() / top).clamp_(min=torch.finfo(torch.float32).tiny)
    # Times the reciprocal: a GPU divides in several instructions, and a cast is to read and write.
    scaled = tensor.float() * scale.reciprocal()
    return scaled.clamp_(limits.min, limits.max).to(kind), scale


@dataclass(slots=True)
class Casts:
    """What is kept of a weight's cast by a sharding engine, which has it as the weight's `casts`.

    The engine forgets it before the values change.
    """

    keeps: bool = False  # whether the values stay until the backward of a forward that begins now
    kept: Any = None


def casts_of(weight: Tensor) -> Casts | None:
    casts: Casts | None = getattr(weight, "casts", None)
    return casts


def kept_cast(weight: Tensor) -> tuple[Tensor, ...]:
    """Data, transpose and scale of the weight's cast if it is kept: inputs of a compiled graph."""
    casts = casts_of(weight)
    return () if casts is None or casts.kept is None else casts.kept[:3]


def make_kept_casts(weights: Iterable[Tensor], dtype: torch.dtype, fp8: Fp8) -> None:
    """Cast those whose values stay until backward, before a graph that cannot keep anything."""
    with torch.no_grad():
        for weight in weights:
            casts = casts_of(weight)
            if casts is not None and casts.keeps:
                weight_operand(weight, dtype, fp8, casts, transposed=False)


def weight_operand(
    weight: Tensor, dtype: torch.dtype, fp8: Fp8 | None, casts: Casts | None, *, transposed: bool
) -> Operand:
    """Return a weight of a layer that computes in `dtype`: for `outputs`, or `transposed`.

    Where its values stay until backward, forward casts it for both.
    """
    kept: Operand | None = None if casts is None else casts.kept
    if kept is not None:
        return kept
    keeps = fp8 is not None and casts is not None and casts.keeps and not transposed
    made = operand(weight.to(dtype), fp8, data=not transposed, transposed=transposed or keeps)
    if keeps:
        assert casts is not None
        casts.kept = made
    return made
