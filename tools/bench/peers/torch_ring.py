"""Attention of ranks that share samples by the ring of torch's experimental context parallelism."""

# torch calls its ring with CUDA's kernels alone. The ring takes the kernel as an argument, and that
# of CPUs gives the same. Its places have the same tokens of a sample as this project's.

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from model.attention import QKV, Core, Documents, SavedAttention

ROTATIONS = {"allgather": "allgather", "p2p": "alltoall"}  # torch's name, by --cp-comm-type
_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
_HEADS, _TOKENS = 1, 2  # dimensions, as torch's ring has them


def torch_ring(group: ProcessGroup, comm_type: str) -> Core:
    """Return the model's attention along a group's ranks, on CPUs, without documents."""
    ring = importlib.import_module(_MODULE)
    ring.set_rotate_method(ROTATIONS[comm_type])

    def attend(qkv: QKV, documents: Documents | None, saved: SavedAttention | None) -> Tensor:
        assert documents is None, "torch's ring knows one document a sample"
        assert saved is None, "and keeps no attention"
        heads_first = (part.transpose(_HEADS, _TOKENS) for part in qkv)
        out: Tensor = _TorchRing.apply(ring, group, *heads_first)
        return out.transpose(_HEADS, _TOKENS)

    return attend


class _TorchRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ring: Any, group: ProcessGroup, *qkv: Tensor) -> Tensor:
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = ring._templated_ring_attention(
            group, _TOKENS, op, *qkv, is_causal=True, dropout_p=0.0
        )
        ctx.ring, ctx.group = ring, group
        ctx.save_for_backward(*qkv, out, lse)
        merged: Tensor = out
        return merged

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = ctx.ring._templated_ring_attention_backward(
            ctx.group,
            _TOKENS,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
            grad_out=grads[0].contiguous(),
            grad_out_name="grad_out",
            query=q,
            key=k,
            value=v,
            out=out,
            logsumexp=lse,
            is_causal=True,
            dropout_p=0.0,
        )
        return None, None, dq, dk, dv
