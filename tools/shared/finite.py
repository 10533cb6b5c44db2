"""Refuses logits of a model that are not finite."""

from __future__ import annotations

import torch
from torch import Tensor

from paro.errors import UserError


def check_logits(values: Tensor, dtype: torch.dtype) -> None:
    """Raise `UserError` if logits, or values computed from them, are not finite in this type."""
    if values.isfinite().all():
        return
    how = "give an earlier iteration with --ckpt-step, or another model"
    if dtype == torch.float16:
        how = "give --bf16, or neither, for fp32: fp16 has no number above 65504"
    raise UserError(f"--load: the model's logits are infinite or NaN: {how}")
