"""Largest values of tensors, from the kernels that write them to the casts that scale by them."""

# Autograd passes a gradient on as a view or as a new object of Python, so what is known belongs to
# the storage, which one whole tensor fills, until its version says that something else was written.
# The largest value of another tensor, such as a sum of gradients, is looked for in a pass over it.

from __future__ import annotations

from torch import Tensor


def remember_largest(tensor: Tensor, largest: Tensor) -> None:
    """Keep the largest value of a contiguous tensor, if that fills its storage.

    Call it after writing. Kernels of Triton do not raise a tensor's version, so none may write into
    it later.
    """
    storage = tensor.untyped_storage()
    if storage.nbytes() == tensor.nbytes:
        storage.largest = tensor._version, largest  # type: ignore[attr-defined]


def known_largest(tensor: Tensor) -> Tensor | None:
    """Return what was remembered of a contiguous tensor whose values are still the same."""
    storage = tensor.untyped_storage()
    version, largest = getattr(storage, "largest", (None, None))
    if storage.nbytes() != tensor.nbytes or version != tensor._version:
        return None
    return largest
