"""Casts operands of matmuls to fp8; weights are cast once while their values stay."""

# [Note: fp8]
# The recipe is Megatron's "tensorwise": every operand is rounded to 8 bits with one scale, from the
# largest absolute value of this very tensor, so there is no state to keep between steps. e4m3 has 3
# bits of mantissa, e5m2 the range that gradients may need: "hybrid" takes it for gradients, "e4m3"
# does not. Sums are fp32 and results have the operands' former type, so parameters, gradients,
# masters and messages are as without fp8. An operand that is not finite makes the scale so, and all
# results NaN: the step is skipped, as without fp8.
#
# [Note: largest values]
# The kernel that writes a tensor also finds the tensor's largest absolute value (amax), by which
# the next cast scales. Autograd may pass a gradient on as a view or a new Python object, so the
# amax is stored with the storage, which one tensor fills. The amax is void once the tensor's
# version counter changes. For other tensors, such as sums of gradients, a pass finds the amax.

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
    """The recipe by which operands of matmuls are cast to fp8."""

    format: Fp8Format
    fused: bool = False  # True: Triton casts


class Fp8Tensor(NamedTuple):
    """A tensor quantized to fp8: the tensor is `data * scale`.

    A GPU's fp8 units need both operands contiguous along the dim that is summed over. So a tensor
    that another matmul sums over its other dim also has a transposed copy.
    """

    data: Tensor | None
    transposed: Tensor | None  # transposed fp8 copy, [last dim, others], contiguous
    scale: Tensor  # factor from fp8 values to the tensor's values; fp32, no dims
    dtype: torch.dtype  # type of the tensor before the cast, and of matmul results

    @property
    def values(self) -> Tensor:
        assert self.data is not None, "cast for a matmul that reads its transpose"
        return self.data

    @property
    def values_t(self) -> Tensor:
        assert self.transposed is not None, "cast for a matmul that reads it as it is"
        return self.transposed


Operand = Tensor | Fp8Tensor


def operand(
    tensor: Tensor,
    fp8: Fp8 | None,
    *,
    is_grad: bool = False,
    data: bool = True,
    transposed: bool = False,
    again: bool = False,
) -> Operand:
    """Cast the tensor for matmuls; without fp8 return it unchanged.

    Read by `outputs`: x.data, weight.data; by `input_grads`: grad.data, weight.transposed; by
    `weight_grad`: grad.transposed, x.transposed. `again`: backward casts this activation once more.
    """
    if fp8 is None:
        return tensor
    kind = _FOR_GRADS[fp8.format] if is_grad else _FOR_VALUES
    if fp8.fused:
        from model.kernels import cast

        made = cast(tensor, kind, data=data, transposed=transposed, again=again)
        return Fp8Tensor(*made, tensor.dtype)
    cast_as_is, scale = _cast(tensor, kind)
    turned = cast_as_is.flatten(0, -2).t().contiguous() if transposed else None
    return Fp8Tensor(cast_as_is if data else None, turned, scale, tensor.dtype)


def _cast(tensor: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    limits = torch.finfo(kind)
    # Not a number: by one, a GPU multiplies with its rounded reciprocal instead of dividing.
    top = torch.full((), limits.max, dtype=torch.float32, device=tensor.device)
    # Zeros alone would have scale 0; values so small that 1 / scale overflowed become 0.
    scale = (tensor.abs().amax().float() / top).clamp_(min=torch.finfo(torch.float32).tiny)
    # Times the reciprocal: a GPU divides in several instructions, and a cast is to read and write.
    scaled = tensor.float() * scale.reciprocal()
    return scaled.clamp_(limits.min, limits.max).to(kind), scale


def remember_largest(tensor: Tensor, largest: Tensor) -> None:
    """Store the amax of a contiguous tensor with its storage, if the tensor fills the storage.

    Call it after the tensor is written. Triton kernels do not increment a tensor's version, so no
    Triton kernel may write into the tensor later.
    """
    storage = tensor.untyped_storage()
    if storage.nbytes() == tensor.nbytes:
        storage.largest = tensor._version, largest  # type: ignore[attr-defined]


def known_largest(tensor: Tensor) -> Tensor | None:
    """Return the stored amax of a contiguous tensor; None if unknown or written since."""
    storage = tensor.untyped_storage()
    version, largest = getattr(storage, "largest", (None, None))
    if storage.nbytes() != tensor.nbytes or version != tensor._version:
        return None
    return largest


@dataclass(slots=True)
class Fp8WeightCache:
    """The fp8 cast of a weight that forward and backward share, in the attribute `fp8_cache`.

    A sharding engine sets the attribute, and clears the cast before the weight's values change.
    """

    is_on: bool = False  # True: the weight's values stay until backward of the next forward
    cast: Any = None

    def operand(
        self, weight: Tensor, dtype: torch.dtype, fp8: Fp8 | None, *, transposed: bool
    ) -> Operand:
        """Cast the weight of a layer that computes in `dtype`, for `outputs` or `transposed`.

        If the weight's values stay until backward, forward makes both casts at once.
        """
        if self.cast is not None:
            return self.cast
        caches = fp8 is not None and self.is_on and not transposed
        made = operand(weight.to(dtype), fp8, data=not transposed, transposed=transposed or caches)
        if caches:
            self.cast = made
        return made


NO_CACHE = Fp8WeightCache()


def fp8_cache_of(weight: Tensor) -> Fp8WeightCache:
    return getattr(weight, "fp8_cache", NO_CACHE)


def cached_cast(weight: Tensor) -> tuple[Tensor, ...]:
    """Return (data, transposed, scale) of a weight's cached cast as inputs of a compiled graph."""
    cast = fp8_cache_of(weight).cast
    return () if cast is None else cast[:3]


def cache_casts(weights: Iterable[Tensor], dtype: torch.dtype, fp8: Fp8) -> None:
    """Cast weights whose values stay until backward, before a compiled graph that cannot cache."""
    with torch.no_grad():
        for weight in weights:
            cache = fp8_cache_of(weight)
            if cache.is_on:
                cache.operand(weight, dtype, fp8, transposed=False)
