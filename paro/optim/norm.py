"""The squared norm of ranges of a rank, such as its gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

ROW = 4096  # elements


def square_sum(ranges: Iterable[Tensor], device: torch.device) -> Tensor:
    """The squared norm over all `ranges`, a fp64 scalar; not finite if any element is not."""
    norms = [norm for values in ranges for norm in _norms(values)]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(norms).double().square().sum()


def _norms(values: Tensor) -> Iterator[Tensor]:
    """Norms whose squares add up to that of the values; a CPU has threads for rows alone."""
    if values.device.type == "cpu":
        rows = values[: values.numel() // ROW * ROW].view(-1, ROW)
        values = values[rows.numel() :]
        yield torch.linalg.vector_norm(
            torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32), dtype=torch.float32
        )
    yield torch.linalg.vector_norm(values, dtype=torch.float32)
