"""Stands in on a CPU for an H100's kernels of attention in parts: cuDNN's and FlashAttention's."""

# cuDNN's operators are registered for the CPU, so torch checks what they are given against their
# schemas. They compute in fp32 by the definition, and refuse what cuDNN, or a plan of it that torch
# has kept, would compute wrong.

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from model import block_attention
from model.block_attention import Gpu

H100 = Gpu(capability=(9, 0), cudnn=91900)

aten = torch.ops.aten


def _repeated(x_BKTH: Tensor, q_BNSH: Tensor) -> Tensor:
    return x_BKTH.float().repeat_interleave(q_BNSH.shape[1] // x_BKTH.shape[1], 1)


def _scores(q_BNSH: Tensor, k_BKTH: Tensor, is_causal: bool) -> Tensor:
    """Scaled scores in fp32; a causal mask begins at the first query and the first key."""
    scores_BNST = q_BNSH.float() @ _repeated(k_BKTH, q_BNSH).mT * q_BNSH.shape[-1] ** -0.5
    hidden = torch.ones_like(scores_BNST, dtype=torch.bool).triu(1)
    return scores_BNST.masked_fill(hidden, float("-inf")) if is_causal else scores_BNST


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    computes_lse: bool,
    dropout: float = 0.0,
    is_causal: bool = False,
) -> tuple[Any, ...]:
    assert bias is None
    assert computes_lse
    assert dropout == 0.0
    scores = _scores(q, k, is_causal)
    lse_BNS1 = scores.logsumexp(-1, keepdim=True)
    out = torch.empty_like(q).copy_((scores - lse_BNS1).exp() @ _repeated(v, q))
    none, number = torch.empty(0), torch.zeros((), dtype=torch.int64)
    return out, lse_BNS1, none, none, q.shape[2], k.shape[2], number, number, none


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_BNS1: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    seed, offset, bias, *bounds, queries, keys, dropout, is_causal = rest
    assert (queries, keys, dropout) == (q.shape[2], k.shape[2], 0.0)
    assert bias is None
    assert bounds == [None, None]
    assert seed.dtype == offset.dtype == torch.int64
    assert lse_BNS1.shape == (*q.shape[:3], 1)
    assert lse_BNS1.dtype == torch.float32
    assert lse_BNS1.is_contiguous()
    assert lse_BNS1.storage_offset() == 0
    assert grad.transpose(1, 2).is_contiguous()
    assert out.transpose(1, 2).is_contiguous()
    p = (_scores(q, k, is_causal) - lse_BNS1).exp()
    row = (grad.float() * out.float()).sum(-1, keepdim=True)
    ds = p * (grad.float() @ _repeated(v, q).mT - row) * q.shape[-1] ** -0.5
    dq, dk, dv = ds @ _repeated(k, q), ds.mT @ q.float(), p.mT @ grad.float()
    dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _flash(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    *lengths, dropout, is_causal, _ = rest
    assert lengths == [None, None, q.shape[1], k.shape[1]]
    first = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*first, dropout, is_causal)
    return [out.transpose(1, 2), lse]


def _flash_backward(*args: Any) -> list[Tensor]:
    *tensors, lse, _, _, queries, keys, dropout, is_causal, _, _ = args
    assert (queries, keys) == (tensors[1].shape[1], tensors[2].shape[1])
    assert lse.is_contiguous()
    first = (x.transpose(1, 2) for x in tensors)
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return [x.transpose(1, 2) for x in grads(*first, lse, dropout, is_causal)]


@contextmanager
def hopper(tile: int = block_attention.TILE) -> Iterator[list[SDPBackend]]:
    """In the block parts are computed by the kernels of an H100, whose names are listed."""
    used: list[SDPBackend] = []

    def chosen(q: Tensor, k: Tensor, causal: bool, flash: bool) -> SDPBackend:
        kernel = H100.block_kernel(q.shape[-1], q.shape[1], k.shape[1], causal=causal)
        used.append(SDPBackend.FLASH_ATTENTION if flash else kernel)
        return used[-1]

    library = torch.library.Library("aten", "IMPL")
    name = "_scaled_dot_product_cudnn_attention"
    for operator, function in ((name, _forward), (f"{name}_backward", _backward)):
        library.impl(operator, function, "CPU")
    with (
        patch.object(block_attention, "TILE", tile),
        patch.object(block_attention, "_block_kernel", chosen),
        patch.object(aten, "_flash_attention_forward", _flash),
        patch.object(aten, "_flash_attention_backward", _flash_backward),
    ):
        yield used
    library._destroy()
