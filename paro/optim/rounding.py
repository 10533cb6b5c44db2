"""Rounds a moment to bf16 at random, by bits that follow from seed, step and element alone."""

# bf16 has 8 significant bits, and a step changes a moment by less than the last bit: rounded to
# nearest, the moment would never change. Stochastic rounding goes up with a probability of the
# fraction that is cut off, so the expectation is exact:
#
#     bits = key2 ^ hash(key1 ^ index of the element in its parameter)    (Even and Mansour, 1991)
#
# The keys depend on seed, step and parameter, and not on ranks, shards or the order of work: a
# resumed or resharded run gets the same bits. The two halves of a hash serve the two moments.

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b
from math import prod

import torch
from torch import Tensor

from paro.layout import ChunkRange, parameter_runs

_HALF = 0xFFFF
# Constants of the 32-bit hash lowbias32, as signed numbers.
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - (1 << 32))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """The position of a range in its parameter, and the other inputs of stochastic rounding.

    Element i of the range has index `start + j // width * stride + j % width`, where j is
    `low + i`.
    """

    seed: int
    name: str
    low: int
    width: int
    stride: int
    start: int

    @classmethod
    def of(cls, part: ChunkRange, seed: int) -> Rounding:
        chunk = part.chunk
        assert chunk.sizes[2:] == chunk.shape[2:], f"{chunk} is cut in its third dim"
        return cls(
            seed=seed,
            name=chunk.name,
            low=part.low,
            width=prod(chunk.sizes[1:]),
            stride=prod(chunk.shape[1:]),
            start=next(parameter_runs(chunk, 0, 1))[0],
        )

    def keys(self, step: int) -> tuple[int, int]:
        """Return two keys for the hash of a step, as signed 32-bit numbers."""
        text = f"{self.seed} {step} {self.name}".encode()
        return struct.unpack("<2i", blake2b(text, digest_size=8).digest())

    def bits(self, begin: int, end: int, step: int, device: torch.device) -> Tensor:
        """Return 32 random bits for each of the elements [begin, end) of the range."""
        first, second = self.keys(step)
        at = torch.arange(self.low + begin, self.low + end, device=device)
        if self.width != self.stride:
            at += at // self.width * (self.stride - self.width)
        hashed = (at + self.start).to(torch.int32)
        hashed ^= first
        for shift, multiplier in zip((16, 15), _MULTIPLIERS, strict=True):
            hashed ^= _shifted(hashed, shift)
            hashed *= multiplier
        hashed ^= _shifted(hashed, 16)
        hashed ^= second
        return hashed


def round_into(values: Tensor, bits: Tensor, into: Tensor) -> None:
    """Write fp32 values, which are overwritten, as bf16: rounded by the low halves of `bits`."""
    words = values.view(torch.int32)
    words += bits & _HALF
    words &= ~_HALF
    into.copy_(values)


def _shifted(words: Tensor, number: int) -> Tensor:
    """Shift unsigned words right, in a type whose own shift copies the sign."""
    return (words >> number).bitwise_and_((1 << (32 - number)) - 1)
