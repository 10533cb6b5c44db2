"""Flat buffers whose storage can be freed and reallocated, and counters of allocated buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paro.layout import UnitLayout
from paro.spec.sharding_spec import UINT8

TORCH_TYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    UINT8: torch.uint8,
}

_SWAPPED = 2**20  # elements that are exchanged at a time


def swap(first: Tensor, second: Tensor) -> None:
    """Exchange the values of two flat tensors, in parts: no copy of either is allocated."""
    for ours, theirs in zip(first.split(_SWAPPED), second.split(_SWAPPED), strict=True):
        before = ours.clone()
        ours.copy_(theirs)
        theirs.copy_(before)


@dataclass(slots=True)
class BufferTally:
    """Current and peak number and bytes of the allocated buffers of one kind."""

    count: int = 0
    num_bytes: int = 0
    peak_count: int = 0
    peak_bytes: int = 0

    def change(self, count: int, num_bytes: int) -> None:
        self.count += count
        self.num_bytes += num_bytes
        self.peak_count = max(self.peak_count, self.count)
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)


@dataclass(slots=True)
class BufferCounters:
    """Counters of this rank's temporary buffers, updated on every alloc and free."""

    whole_params: BufferTally = field(default_factory=BufferTally)
    whole_grads: BufferTally = field(default_factory=BufferTally)
    # Spare slices of rotating parameters, gradients.
    slices: BufferTally = field(default_factory=BufferTally)


class ElasticBuffer:
    """A 1-D tensor whose storage can be freed and reallocated while every view stays valid.

    Tensors saved by autograd are views of one storage object, so the storage is resized and never
    replaced. Between `free` and `alloc` reading any view is an error. `resize(storage, num_bytes)`
    gives the storage at least `num_bytes`, or no memory for 0.
    """

    def __init__(
        self,
        numel: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        tally: BufferTally,
        layout: UnitLayout | None = None,
        resize: Callable[[torch.UntypedStorage, int], object] = torch.UntypedStorage.resize_,
    ) -> None:
        self.values = torch.empty(numel, dtype=dtype, device=device)
        # Created while the storage is allocated: a view of an empty storage cannot be created.
        self.views = {} if layout is None else param_views(self.values, layout)
        self._num_bytes = self.values.untyped_storage().nbytes()
        self._tally = tally
        self._resize = resize
        self.values.untyped_storage().resize_(0)

    @property
    def alive(self) -> bool:
        return self.values.untyped_storage().nbytes() > 0

    def alloc(self) -> None:
        """Allocate the storage; its contents are uninitialized."""
        assert not self.alive, "storage taken twice"
        self._resize(self.values.untyped_storage(), self._num_bytes)
        self._tally.change(1, self._num_bytes)

    def free(self) -> None:
        """Free the storage."""
        assert self.alive, "storage dropped twice"
        self._resize(self.values.untyped_storage(), 0)
        self._tally.change(-1, -self._num_bytes)


def param_views(whole: Tensor, layout: UnitLayout) -> dict[str, Tensor]:
    """Return views of a unit's unsharded flat buffer: {parameter name: view}."""
    return {c.chunk.name: whole[c.offset : c.stop].view(c.chunk.sizes) for c in layout.chunks}
