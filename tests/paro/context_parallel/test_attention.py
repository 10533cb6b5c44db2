"""What the start says of ranks that attend to their own tokens alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from model.attention import QKV, Documents, SavedAttention, attend
from paro.context_parallel.attention import check_core
from paro.spec.context_layout import ContextLayout
from tests.helpers.refusals import refused


def attend_whole(qkv: QKV, documents: Documents | None, _: SavedAttention | None) -> Tensor:
    return attend(qkv, "auto", documents)


def alone(qkv: QKV, documents: Documents | None, _: SavedAttention | None) -> Tensor:
    lengths = (5, qkv[0].shape[1] - 5)
    return attend_whole(qkv, None if documents is None else Documents(lengths), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_attention_to_own_tokens_alone_ends_the_run(
    rank: int, apart: bool, dtype: torch.dtype
) -> None:
    layout, head = ContextLayout(size=2), torch.empty(8, dtype=dtype)
    told = f"rank {rank} ... 2 ranks that share a sample ... --cp-comm-type"
    refused(lambda: check_core(alone, layout, rank, head, "auto", apart=apart), told, status=1)


def test_values_that_are_none_end_it_too() -> None:
    layout, head = ContextLayout(), torch.empty(8)

    def broken(*given: Any) -> Tensor:
        return attend_whole(*given) * torch.nan

    check_core(attend_whole, layout, 0, head, "auto", apart=True)
    refused(lambda: check_core(broken, layout, 0, head, "auto", apart=True), "nan", status=1)
