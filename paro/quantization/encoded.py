"""The parts of an encoded range as views of its bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from paro.quantization.ranges import RangeCodes


def split_encoded(
    payload: Tensor, codes: RangeCodes, start: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The scales and codes of the range at `start`, and its uncoded elements, of `dtype`."""
    assert dtype.itemsize == codes.uncoded_bytes, f"{dtype} is not of {codes.uncoded_bytes} bytes"
    coded = codes.num_coded(start)
    cut = codes.form.num_bytes(coded)
    stop = cut + (codes.numel - coded) * dtype.itemsize
    return payload[:cut], payload[cut:stop].view(dtype)
