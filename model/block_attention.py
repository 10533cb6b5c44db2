"""Attention of queries to one block of the keys, with its log-sum-exp, and its gradients."""

# [Note: attention in parts]
# Softmax over keys that arrive block by block: each block gives an output and the log-sum-exp of
# its scores, and two of these merge into those of both blocks' keys. Gradients need nothing of a
# block's own forward: from output and log-sum-exp over all keys, a kernel computes the block's
# exact share of them. Blocks are merged in fp32.
#
# Kernels disagree on which keys a causal mask hides if there are more keys than queries. So only
# squares are causal here; rectangles have no mask. Keys may have fewer heads than queries.

# [Note: documents in one call]
# FlashAttention, which is for 16-bit types on a GPU, takes all documents of a micro-batch at once,
# and needs their bounds there: they are copied from page-locked memory, so that nothing waits.
# Elsewhere there is one call per document. Neither needs a mask, or computes scores that a mask
# would hide.

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from model.attention import Documents, attend, chosen_kernel, documents_of
from model.config import BLOCK_BACKENDS, AttentionBackend, LlamaConfig, flash_takes
from model.kept import Attended, KeptAttention
from paro.errors import UserError

Grads = tuple[Tensor, Tensor, Tensor]  # of queries, keys and values, in their types and shapes

_NAMES = {
    SDPBackend.FLASH_ATTENTION: "FlashAttention",
    SDPBackend.EFFICIENT_ATTENTION: "torch's memory-efficient kernel",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.MATH: "matrix products and a softmax",
}
_PROBE_TOKENS = 128


class Partial(NamedTuple):
    """Attention to some of the keys: output, and log-sum-exp of the scaled scores in fp32."""

    out_BSNH: Tensor  # noqa: N815
    lse_BSN: Tensor  # noqa: N815

    def of(self, *at: slice) -> Partial:
        """The same of some samples, queries and heads, as views."""
        return Partial(self.out_BSNH[at], self.lse_BSN[at])

    def merge_(self, other: Partial) -> None:
        """Makes this, whose output is fp32, attention to the keys of both."""
        share_BSN = torch.sigmoid(other.lse_BSN - self.lse_BSN)
        self.out_BSNH.lerp_(other.out_BSNH.float(), share_BSN[..., None])
        self.lse_BSN.copy_(torch.logaddexp(self.lse_BSN, other.lse_BSN))


def attend_block(
    q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, *, causal: bool = False
) -> Partial:
    """Attention to all these keys; if `causal`, of query i to keys 0 .. i of as many."""
    _check_square(q_BSNH, k_BSKH, causal=causal)
    if q_BSNH.device.type == "cuda":
        lengths = None, None, q_BSNH.shape[1], k_BSKH.shape[1]
        out_BSNH, lse_BNS = _flash(q_BSNH, k_BSKH, v_BSKH, *lengths, causal)
        return Partial(out_BSNH, lse_BNS.transpose(1, 2))
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_heads_first(q_BSNH, k_BSKH, v_BSKH), 0.0, causal
    )
    return Partial(*_heads_first(*found))


def block_grads(
    grad_BSNH: Tensor,
    q_BSNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    whole: Partial,
    *,
    causal: bool = False,
) -> Grads:
    """A block's share of the gradients; `whole` is the queries' attention to all their keys."""
    _check_square(q_BSNH, k_BSKH, causal=causal)
    if q_BSNH.device.type == "cuda":
        lengths = None, None, q_BSNH.shape[1], k_BSKH.shape[1]
        lse_BNS = whole.lse_BSN.transpose(1, 2).contiguous()
        return _flash_grads(
            grad_BSNH, q_BSNH, k_BSKH, v_BSKH, whole.out_BSNH, lse_BNS, *lengths, causal
        )
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *_heads_first(grad_BSNH, q_BSNH, k_BSKH, v_BSKH, *whole), 0.0, causal
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def attend_causally(
    q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, documents: Documents | None
) -> Partial:
    """Causal attention within each sample or, with documents of all samples, within each."""
    if documents is None:
        return attend_block(q_BSNH, k_BSKH, v_BSKH, causal=True)
    flat = [part.flatten(0, 1) for part in (q_BSNH, k_BSKH, v_BSKH)]
    if documents.bounds_N is not None:
        out_TNH, lse_NT = _flash(*flat, *_bounds(documents), True)
        return Partial(out_TNH.view_as(q_BSNH), lse_NT.t().reshape(q_BSNH.shape[:3]))
    parts = zip(*(part.split(documents.lengths) for part in flat), strict=True)
    found = [attend_block(q[None], k[None], v[None], causal=True) for q, k, v in parts]
    outs, lses = zip(*found, strict=True)
    lse_BSN = torch.cat(lses, 1).view(q_BSNH.shape[:3])
    return Partial(torch.cat(outs, 1).view_as(q_BSNH), lse_BSN)


def causal_grads(
    grad_BSNH: Tensor,
    q_BSNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    whole: Partial,
    documents: Documents | None,
) -> Grads:
    """The share of `attend_causally` in the gradients."""
    if documents is None:
        return block_grads(grad_BSNH, q_BSNH, k_BSKH, v_BSKH, whole, causal=True)
    flat = [part.flatten(0, 1) for part in (grad_BSNH, q_BSNH, k_BSKH, v_BSKH, *whole)]
    if documents.bounds_N is not None:
        lse_NT = flat.pop().t().contiguous()
        dq, dk, dv = _flash_grads(*flat, lse_NT, *_bounds(documents), True)
    else:
        parts = zip(*(part.split(documents.lengths) for part in flat), strict=True)
        found = []
        for one in parts:
            grad, q, k, v, *whole_of_one = (part[None] for part in one)
            found.append(block_grads(grad, q, k, v, Partial(*whole_of_one), causal=True))
        dq, dk, dv = (torch.cat(grads, 1) for grads in zip(*found, strict=True))
    return dq.view_as(q_BSNH), dk.view_as(k_BSKH), dv.view_as(v_BSKH)


def attend_keeping(
    backend: AttentionBackend,
    q_BSNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    documents: Documents | None,
    kept: KeptAttention | None,
) -> Tensor:
    """Causal attention within each document; what it has `kept`, it does not compute again."""
    if kept is None and not _in_one_call(documents, q_BSNH, backend):
        return attend(q_BSNH, k_BSKH, v_BSKH, backend, documents)
    out_BSNH: Tensor = _Keeping.apply(documents, kept, q_BSNH, k_BSKH, v_BSKH)
    return out_BSNH


class _Keeping(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        documents: Documents | None,
        kept: KeptAttention | None,
        q_BSNH: Tensor,
        k_BSKH: Tensor,
        v_BSKH: Tensor,
    ) -> Tensor:
        def attend() -> Attended:
            return attend_causally(q_BSNH, k_BSKH, v_BSKH, documents)

        whole = attend() if kept is None else kept.attended(attend)
        ctx.documents = documents
        ctx.save_for_backward(q_BSNH, k_BSKH, v_BSKH, *whole)
        return whole[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_BSNH, k_BSKH, v_BSKH, *whole = ctx.saved_tensors
        documents = ctx.documents
        found = causal_grads(grads[0], q_BSNH, k_BSKH, v_BSKH, Partial(*whole), documents)
        return None, None, *found


def check_attention(
    config: LlamaConfig, dtype: torch.dtype, device: torch.device, *, documents: bool = False
) -> str:
    """Which kernel computes attention, in words; `UserError` if the chosen one cannot.

    A short sample of the model's heads is computed forward and backward; with `documents`, two that
    are kept apart.
    """
    backend = config.attention_backend
    q_BSNH, k_BSKH, v_BSKH = (
        torch.zeros(
            1, _PROBE_TOKENS, heads, config.kv_channels, dtype=dtype, device=device
        ).requires_grad_()
        for heads in (config.num_attention_heads, *2 * (config.num_query_groups,))
    )
    chosen = chosen_kernel(q_BSNH, k_BSKH, v_BSKH, backend)
    name = _NAMES.get(chosen, "another kernel")
    words = f"{backend}, {name}"
    if backend == "auto":
        words = f"auto, for these heads {name}"
        if chosen == SDPBackend.MATH:
            words += (
                ", which keep all scores: the predicted memory counts them with "
                "--attention-backend unfused"
            )
    half = _PROBE_TOKENS // 2
    lengths = documents_of((half, half) if documents else None, 1, device)
    try:
        attend_keeping(backend, q_BSNH, k_BSKH, v_BSKH, lengths, None).sum().backward()
    except RuntimeError as error:
        kind = str(dtype).removeprefix("torch.")
        raise UserError(
            f"--attention-backend {backend}: {name} does not compute heads of "
            f"{config.kv_channels} channels in {kind} on this {device.type}: give "
            f"{'unfused' if backend == 'auto' else 'auto'}, or another"
        ) from error
    return words


def _flash(*args: Any) -> tuple[Tensor, Tensor]:
    *tensors, causal = args
    out, lse, *_ = torch.ops.aten._flash_attention_forward(*tensors, 0.0, causal, False)
    return out, lse


def _flash_grads(*args: Any) -> Grads:
    *tensors, causal = args
    # The state of a random generator, which nothing reads without dropout.
    unused = torch.zeros(2, dtype=torch.uint64, device=args[0].device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(*tensors, 0.0, causal, unused, unused)
    return dq, dk, dv


def _in_one_call(documents: Documents | None, q_BSNH: Tensor, backend: AttentionBackend) -> bool:
    has_bounds = documents is not None and documents.bounds_N is not None
    takes = flash_takes(q_BSNH.itemsize, q_BSNH.shape[-1])
    return has_bounds and takes and backend in BLOCK_BACKENDS


def _bounds(documents: Documents) -> tuple[Tensor, Tensor, int, int]:
    bounds_N, longest = documents.bounds_N, max(documents.lengths)
    assert bounds_N is not None
    return bounds_N, bounds_N, longest, longest


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Views with tokens and heads exchanged."""
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


def _check_square(q_BSNH: Tensor, k_BSKH: Tensor, *, causal: bool) -> None:
    assert not causal or q_BSNH.shape[1] == k_BSKH.shape[1], "a causal block that is no square"
