"""Formats of quantized ranges: how many bytes they take, computed without torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

FULL_BITS = 16  # no codes: values are sent in their own dtype
PAD = 32  # codes are padded to a multiple: the length of a Hadamard transform
_SCALE_BYTES = 4  # a float32 for each block


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """Symmetric codes of `bits` bits with one float32 scale for every `block` elements.

    An encoded range is its scales followed by its codes, of 4 bits two to a byte.
    """

    bits: int
    block: int

    def __post_init__(self) -> None:
        assert self.bits in (4, 8), f"codes of {self.bits} bits"
        assert self.block % PAD == 0, f"blocks of {self.block} elements"

    @cached_property
    def top(self) -> int:
        """The largest code; the smallest is its negative: symmetric codes have no bias."""
        return (1 << (self.bits - 1)) - 1

    def num_blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def scale_bytes(self, numel: int) -> int:
        return _SCALE_BYTES * self.num_blocks(numel)

    def num_bytes(self, numel: int) -> int:
        """Return the bytes of `numel` encoded elements."""
        return self.scale_bytes(numel) + padded(numel) * self.bits // 8


ERROR_FORM = BlockFormat(bits=8, block=128)  # of what codes of gradients have lost


def padded(numel: int) -> int:
    """Return the number of codes of `numel` elements."""
    return -(-numel // PAD) * PAD


def error_bytes(numel: int) -> int:
    """Return the bytes that remember what codes of `numel` gradients have lost."""
    return ERROR_FORM.num_bytes(padded(numel))
