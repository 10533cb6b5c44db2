"""Updated parameters of a unit as codes of their differences (Note: differences of parameters)."""

from __future__ import annotations

import torch
from torch import Tensor

from paro.quantization.blocks import decode, encode
from paro.quantization.encoded import split_encoded
from paro.quantization.ranges import RangeCodes


class CodedUpdate:
    """The encoded optimizer ranges of a parameter shard, and their buffer, which stays allocated.

    `encode` writes this rank's range and applies it; after the all-gather of `encoded`, `apply`
    changes the others.
    """

    def __init__(self, codes: RangeCodes, param_shard: Tensor, start: int) -> None:
        self._codes = codes
        self._param_shard = param_shard
        self._start = start  # of the shard in the unit's flat buffer
        self._own: int | None = None  # the place of this rank's range
        num_ranges = param_shard.numel() // codes.numel
        self.encoded = torch.zeros(
            num_ranges * codes.range_bytes, dtype=torch.uint8, device=param_shard.device
        )

    def encode(self, master: Tensor, param: Tensor, place: int) -> None:
        """Encodes the difference between the master and the parameters of this rank's range.

        The parameters have it at once, and not after the all-gather: copies of this range for
        checkpoints and for the node's memory wait for no other rank.
        """
        codes, uncoded = self._parts(place)
        coded = self._codes.num_coded(self._range_start(place))
        encode(master[:coded], self._codes.form, codes, minus=param[:coded])
        uncoded.copy_(master[coded:])
        self._add(param, place)
        self._own = place

    def apply(self) -> None:
        """Adds the decoded differences of all other ranges to the parameters."""
        for place, param in enumerate(self._param_shard.view(-1, self._codes.numel)):
            if place != self._own:
                self._add(param, place)

    def _add(self, param: Tensor, place: int) -> None:
        """Adds what range `place` has as codes, and writes what it has exactly."""
        codes, uncoded = self._parts(place)
        coded = self._codes.num_coded(self._range_start(place))
        decode(codes, self._codes.form, param[:coded], adds=True)
        param[coded:] = uncoded

    def _range_start(self, place: int) -> int:
        return self._start + place * self._codes.numel

    def _parts(self, place: int) -> tuple[Tensor, Tensor]:
        """The bytes of scales and codes of a range, and its uncoded elements."""
        size = self._codes.range_bytes
        payload = self.encoded[place * size : (place + 1) * size]
        start = self._range_start(place)
        return split_encoded(payload, self._codes, start, self._param_shard.dtype)
