"""Blocks of attention, merged, against attention by its definition in fp64; and their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model.attention import documents_of
from model.block_attention import (
    Partial,
    attend_block,
    attend_causally,
    block_grads,
    causal_grads,
)
from tests.model.values import all_near, attention_by_definition, normal

CPU = torch.device("cpu")
GPU = pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)
TOKENS, HEADS, CHANNELS = 10, 4, 16
CUT = 4  # the first block's keys, which is a rectangle; the second is a square
LENGTHS = (3, 7, 1, 9)  # documents of two samples


def inputs(groups: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """q, k, v and a gradient; two samples, in a tensor of which they are every other token."""
    return [
        normal(2, 2 * TOKENS, heads, CHANNELS, seed=seed, dtype=dtype).to(device)[:, ::2]
        for seed, heads in enumerate((HEADS, groups, groups, HEADS))
    ]


def defined(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, lengths: tuple[int, ...] | None = None
) -> list[Tensor]:
    """Output, log-sum-exp and the gradients of q, k and v, in fp64."""
    leaves = [part.double().requires_grad_() for part in (q, k, v)]
    out, lse = attention_by_definition(*leaves, lengths)
    return [out, lse, *torch.autograd.grad(out, leaves, grad.double())]


def of_last_queries(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """The same for the queries of the second block."""
    late = torch.arange(TOKENS, device=grad.device) >= CUT
    out, lse, dq, dk, dv = defined(q, k, v, grad * late[:, None, None])
    return [out[:, CUT:], lse[:, CUT:], dq[:, CUT:], dk, dv]


def margin(dtype: torch.dtype) -> float:
    return 3e-6 if dtype == torch.float32 else 2e-2


def two_blocks(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Partial, list[Tensor]]:
    """Causal attention of the last queries: the keys before them, and their own."""
    late, early, own = slice(CUT, None), slice(CUT), (slice(None), slice(CUT, None))
    first = attend_block(q[:, late], k[:, early], v[:, early])
    whole = Partial(first.out_BSNH.float(), first.lse_BSN)
    whole.merge_(attend_block(q[own], k[own], v[own], causal=True))
    total = Partial(whole.out_BSNH.to(q.dtype), whole.lse_BSN)
    dq, dk, dv = (torch.zeros_like(part, dtype=torch.float32) for part in (q, k, v))
    for keys, causal in ((early, False), (late, True)):
        found = block_grads(grad[own], q[own], k[:, keys], v[:, keys], total, causal=causal)
        dq[own] += found[0]
        dk[:, keys] += found[1]
        dv[:, keys] += found[2]
    return total, [dq[own], dk, dv]


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_merged_blocks_are_attention(dtype: torch.dtype, groups: int, device: torch.device) -> None:
    if device.type == "cuda" and dtype == torch.float32:
        pytest.skip("FlashAttention is for 16 bits")
    q, k, v, grad = inputs(groups, dtype, device)
    found, grads = two_blocks(q, k, v, grad)
    all_near([*found, *grads], of_last_queries(q, k, v, grad), within=margin(dtype))
    assert found.lse_BSN.dtype == torch.float32


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squares_keep_documents_apart(
    dtype: torch.dtype, groups: int, lengths: tuple[int, ...] | None, device: torch.device
) -> None:
    if device.type == "cuda" and dtype == torch.float32:
        pytest.skip("FlashAttention is for 16 bits")
    q, k, v, grad = inputs(groups, dtype, device)
    documents = documents_of(lengths, 2, device)
    whole = attend_causally(q, k, v, documents)
    grads = causal_grads(grad, q, k, v, whole, documents)
    wanted = defined(q, k, v, grad, lengths)
    all_near([*whole, *grads], wanted, within=margin(dtype))


def test_scores_far_apart_merge() -> None:
    """The exponential of a difference of scores may overflow."""
    q, k, v, grad = (part * 40 for part in inputs(HEADS, torch.float32, CPU))
    found, _ = two_blocks(q, k, v, grad)
    all_near(found, of_last_queries(q, k, v, grad)[:2], within=1e-5)
