"""Page-locks host memory, which GPUs copy to and from at full speed and beside computing."""

from __future__ import annotations

import torch
from torch import Tensor

from paro.errors import RunError
from paro.text import size_text


def pin(room: Tensor, device: torch.device) -> None:
    """Page-locks the memory of `room` for a GPU until the process ends.

    torch's own pinned tensors would take up to twice their size, which it rounds up to a power of
    two. Ranges that are locked one by one must not share a page: lock one block, and cut it.
    """
    with torch.cuda.device(device):  # a new thread's is GPU 0, where every rank would get a context
        status = int(torch.cuda.cudart().cudaHostRegister(room.data_ptr(), room.nbytes, 0))
    if status != 0:
        raise RunError(
            f"{size_text(room.nbytes)} of host memory cannot be page-locked for copies from "
            f"{device}: CUDA error {status}"
        )
