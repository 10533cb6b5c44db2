"""Size and data type of a micro-batch on a rank, which decide time and memory."""

from __future__ import annotations

from dataclasses import dataclass

from paro.context_parallel.layout import ALONE, ContextLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Size and data type of one micro-batch on a rank, and the device type that computes it."""

    size: int
    seq_length: int
    compute_bytes: int  # per element
    device_type: str  # decides which kernels exist
    context: ContextLayout = ALONE  # the ranks that share its samples

    @property
    def num_tokens(self) -> int:
        """Of its samples on one rank."""
        return self.size * self.seq_length // self.context.size

    def tensor_bytes(self, width: int) -> int:
        """Of a tensor in the compute type with so many elements for each token."""
        return self.num_tokens * width * self.compute_bytes
