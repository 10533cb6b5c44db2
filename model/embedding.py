"""The token embedding; on a CPU its gradient is added to a sink row by row."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from model.matmul import GradSink, sink_of
from model.norm import Slices, add_slices


class Embedding(nn.Module):
    """The token embedding."""

    weight: nn.Parameter

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.starts = {"weight": 0}  # token id of the first row; above 0 in a vocabulary slice

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSD = self.look_up(tokens_BS)
        return x_BSD if self.scale == 1.0 else x_BSD.mul_(self.scale)

    def look_up(self, tokens_BS: Tensor) -> Tensor:
        return _rows(tokens_BS, self.weight)

    def look_up_slice(self, tokens_BS: Tensor) -> Tensor:
        """Look up the tokens whose rows are in this slice; other tokens get zeros."""
        row_BS = tokens_BS - self.starts["weight"]
        elsewhere_BS = (row_BS < 0) | (row_BS >= self.weight.shape[0])
        x_BSD = _rows(row_BS.masked_fill(elsewhere_BS, 0), self.weight)
        return x_BSD.masked_fill(elsewhere_BS[..., None], 0.0)

    def join_look_up(self, slices: Slices, tokens_BS: Tensor) -> Tensor:
        return add_slices(slices, tokens_BS)


def _rows(row_BS: Tensor, weight_VD: Tensor) -> Tensor:
    sink = sink_of(weight_VD)
    # Not row by row on a GPU, where the order of additions would vary, nor in 16 bits, where each
    # would round: autograd delivers a whole gradient there.
    if sink is None or weight_VD.device.type != "cpu" or weight_VD.dtype != torch.float32:
        return F.embedding(row_BS, weight_VD)
    return _RowsOfSink.apply(row_BS, weight_VD, sink)


class _RowsOfSink(torch.autograd.Function):
    """Embedding look-up whose backward adds row gradients into the weight's gradient sink."""

    @staticmethod
    def forward(ctx: Any, row_BS: Tensor, weight_VD: Tensor, sink: GradSink) -> Tensor:
        ctx.save_for_backward(row_BS)
        ctx.sink = sink
        return F.embedding(row_BS, weight_VD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (row_BS,) = ctx.saved_tensors
        (grad_BSD,) = grads
        into_VD, adds = ctx.sink.open()
        if not adds:
            into_VD.zero_()
        into_VD.index_add_(0, row_BS.flatten(), grad_BSD.flatten(0, -2))
        ctx.sink.close()
        return None, None, None
