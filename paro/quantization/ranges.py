"""Which elements of updates and gradients are sent as codes, and in how many bytes."""

# [Note: differences of parameters]
# Between groups the owner of an optimizer range sends codes of D = master - float(p), where p is
# the copy in the compute dtype that every holder has. Every holder, the owner too, sets
# p = float(p) + code x scale, rounded to the compute dtype. What the codes lose stays in
# master - p and is part of the next D: error feedback that needs no memory. A range is sent as
#
#   scales   float32, one for every block of its matrices' elements
#   codes    of its matrices' elements, padded to 32
#   uncoded  its other elements, as the compute dtype: norms, biases, padding
#   padding  to the longest range of the unit, since shards of an all-gather have equal sizes
#
# A range with less than 2,048 elements of matrices is sent exactly. Gradients are sent in the same
# form (Note: sums of codes in paro/collectives/coded.py), their uncoded elements in the
# communication dtype.

from __future__ import annotations

from dataclasses import dataclass

from paro.quantization.formats import BlockFormat, error_bytes

UPDATE_BLOCK, GRADIENT_BLOCK = 2048, 128  # elements
_LEAST = 2048  # elements of matrices; a range with fewer has no codes
_ALIGN = 16  # bytes: encoded ranges begin at multiples


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeCodes:
    """How the optimizer ranges of a unit are sent; all have `range_bytes`."""

    form: BlockFormat
    numel: int  # elements of a range
    slice_numel: int  # elements of a slice of the unit's flat buffer, usually all
    matrix_stop: int  # matrices are before this element of every slice
    uncoded_bytes: int  # of an element that has no code

    def num_coded(self, start: int) -> int:
        """How many of the first elements of the range at `start` have codes."""
        matrices = min(max(self.matrix_stop - start % self.slice_numel, 0), self.numel)
        return matrices if matrices >= _LEAST else 0

    @property
    def error_bytes(self) -> int:
        """The bytes that remember what the codes of a range have lost."""
        return -(-error_bytes(self.numel) // _ALIGN) * _ALIGN

    @property
    def range_bytes(self) -> int:
        """The bytes of the longest range: the first, the one where matrices end, or the last."""
        starts = {0, self.matrix_stop // self.numel * self.numel, self.slice_numel - self.numel}
        longest = max(self._num_bytes(start) for start in starts if start < self.slice_numel)
        return -(-longest // _ALIGN) * _ALIGN

    def _num_bytes(self, start: int) -> int:
        coded = self.num_coded(start)
        return self.form.num_bytes(coded) + (self.numel - coded) * self.uncoded_bytes
