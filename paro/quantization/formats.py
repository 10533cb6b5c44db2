"""Formats of quantized optimizer ranges: which elements are quantized, and into how many bytes."""

# [Note: quantized updates]
# Between groups the owner of an optimizer range sends the update D in quantized form:
#
#   D = master - float(p)              p: the parameters in the compute dtype, equal on all holders
#   p = float(p) + dequantized D       on every holder, also the owner; rounded to the compute dtype
#
# The quantization error stays in master - p and is part of the next D: error feedback without
# extra memory. A range is sent as
#
#   scales     float32, one for every block of its matrices' elements
#   quantized  its matrices' elements, padded to a multiple of 32
#   exact      its other elements, in the compute dtype: norms, biases, padding of the buffer
#   padding    to the longest range of the unit, since shards of an all-gather have equal sizes
#
# A range with less than 2,048 elements of matrices is sent exactly. Gradients are sent in the same
# form, exact elements in the communication dtype (Note: quantized sums, paro/collectives).

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

FULL_BITS = 16  # bit width that means: values are sent in their own dtype, not quantized
PAD = 32  # length of a Hadamard transform; quantized elements are padded to a multiple
UPDATE_BLOCK, GRADIENT_BLOCK = 2048, 128  # elements that share a scale
_SCALE_BYTES = 4  # bytes of the scale of a block, a float32
_LEAST = 2048  # elements of matrices; a range with fewer is sent exactly
_ALIGN = 16  # bytes; quantized ranges begin at multiples of the alignment


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """Symmetric quantization to bit width `bits`, with one float32 scale per `block` elements.

    The bytes are the scales, then the quantized elements; with bit width 4, two per byte.
    """

    bits: int
    block: int

    def __post_init__(self) -> None:
        assert self.bits in (4, 8), f"quantization to {self.bits} bits"
        assert self.block % PAD == 0, f"blocks of {self.block} elements"

    @cached_property
    def top(self) -> int:
        """Largest quantized value; the smallest is -top, as a symmetric range has no bias."""
        return (1 << (self.bits - 1)) - 1

    def num_blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def scale_bytes(self, numel: int) -> int:
        return _SCALE_BYTES * self.num_blocks(numel)

    def num_bytes(self, numel: int) -> int:
        """Return the number of bytes of `numel` quantized elements, with their scales."""
        return self.scale_bytes(numel) + padded(numel) * self.bits // 8


ERROR_FORM = BlockFormat(bits=8, block=128)  # format of gradients' quantization errors
ERROR_WEIGHT = 0.2  # weight of the newest quantization error in the moving average


def padded(numel: int) -> int:
    """Round a number of elements up to whole Hadamard transforms."""
    return -(-numel // PAD) * PAD


def error_bytes(numel: int) -> int:
    """Return the number of bytes of the quantization errors of `numel` gradients."""
    return ERROR_FORM.num_bytes(padded(numel))


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeFormat:
    """Format of a unit's optimizer ranges as they are sent, each in `range_bytes` bytes."""

    form: BlockFormat
    numel: int  # number of elements of a range
    slice_numel: int  # number of elements of a slice of the unit's flat buffer, usually all
    matrix_stop: int  # end of the matrices in every slice, in elements
    exact_bytes: int  # bytes of an element that is sent unquantized

    def num_quantized(self, start: int) -> int:
        """Count the quantized elements of the range at `start`; they are the first elements."""
        matrices = min(max(self.matrix_stop - start % self.slice_numel, 0), self.numel)
        return matrices if matrices >= _LEAST else 0

    @property
    def error_bytes(self) -> int:
        """Number of bytes of the quantization errors of a range."""
        return -(-error_bytes(self.numel) // _ALIGN) * _ALIGN

    @property
    def range_bytes(self) -> int:
        """Bytes of the longest range: the first, the range in which matrices end, or the last."""
        starts = {0, self.matrix_stop // self.numel * self.numel, self.slice_numel - self.numel}
        longest = max(self._num_bytes(start) for start in starts if start < self.slice_numel)
        return -(-longest // _ALIGN) * _ALIGN

    def _num_bytes(self, start: int) -> int:
        quantized = self.num_quantized(start)
        return self.form.num_bytes(quantized) + (self.numel - quantized) * self.exact_bytes
