"""Formats of quantized optimizer ranges: which elements are quantized, and into how many bytes."""

# [Note: quantized updates]
# Between groups the owner of an optimizer range sends D = master - float(p) quantized, where p is
# the copy in the compute dtype that every holder has. Every holder, the owner too, sets
# p = float(p) + dequantized D, rounded to the compute dtype. The quantization error stays in
# master - p and is part of the next D: error feedback that needs no memory. A range is sent as
#
#   scales     float32, one for every block of its matrices' elements
#   quantized  its matrices' elements, padded to 32
#   exact      its other elements, in the compute dtype: norms, biases, padding
#   padding    to the longest range of the unit, since shards of an all-gather have equal sizes
#
# A range with less than 2,048 elements of matrices is sent exactly. Gradients are sent in the same
# form ([Note: quantized sums] in paro/collectives/quantized.py), exact elements in the
# communication dtype.

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

FULL_BITS = 16  # not quantized: values are sent in their own dtype
PAD = 32  # quantized elements are padded to a multiple: the length of a Hadamard transform
UPDATE_BLOCK, GRADIENT_BLOCK = 2048, 128  # elements
_SCALE_BYTES = 4  # a float32 for each block
_LEAST = 2048  # elements of matrices; a range with fewer is sent exactly
_ALIGN = 16  # bytes: quantized ranges begin at multiples


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """Symmetric quantization to `bits` bits, with one float32 scale for every `block` elements.

    The bytes are the scales followed by the quantized elements, of 4 bits two to a byte.
    """

    bits: int
    block: int

    def __post_init__(self) -> None:
        assert self.bits in (4, 8), f"quantization to {self.bits} bits"
        assert self.block % PAD == 0, f"blocks of {self.block} elements"

    @cached_property
    def top(self) -> int:
        """The largest level; the smallest is its negative: symmetric levels have no bias."""
        return (1 << (self.bits - 1)) - 1

    def num_blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def scale_bytes(self, numel: int) -> int:
        return _SCALE_BYTES * self.num_blocks(numel)

    def num_bytes(self, numel: int) -> int:
        """Return the bytes of `numel` quantized elements."""
        return self.scale_bytes(numel) + padded(numel) * self.bits // 8


ERROR_FORM = BlockFormat(bits=8, block=128)  # of the quantization errors of gradients
ERROR_WEIGHT = 0.2  # of the newest error in their moving average


def padded(numel: int) -> int:
    """Round a number of elements up to whole Hadamard transforms."""
    return -(-numel // PAD) * PAD


def error_bytes(numel: int) -> int:
    """Return the bytes of the quantization errors of `numel` gradients."""
    return ERROR_FORM.num_bytes(padded(numel))


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeFormat:
    """Format of a unit's optimizer ranges as they are sent; all have `range_bytes`."""

    form: BlockFormat
    numel: int  # elements of a range
    slice_numel: int  # elements of a slice of the unit's flat buffer, usually all
    matrix_stop: int  # matrices are before this element of every slice
    exact_bytes: int  # of an element that is not quantized

    def num_quantized(self, start: int) -> int:
        """Count the quantized elements, the first ones, of the range at `start`."""
        matrices = min(max(self.matrix_stop - start % self.slice_numel, 0), self.numel)
        return matrices if matrices >= _LEAST else 0

    @property
    def error_bytes(self) -> int:
        """Bytes of the quantization errors of a range."""
        return -(-error_bytes(self.numel) // _ALIGN) * _ALIGN

    @property
    def range_bytes(self) -> int:
        """Bytes of the longest range: the first, the one where matrices end, or the last."""
        starts = {0, self.matrix_stop // self.numel * self.numel, self.slice_numel - self.numel}
        longest = max(self._num_bytes(start) for start in starts if start < self.slice_numel)
        return -(-longest // _ALIGN) * _ALIGN

    def _num_bytes(self, start: int) -> int:
        quantized = self.num_quantized(start)
        return self.form.num_bytes(quantized) + (self.numel - quantized) * self.exact_bytes
