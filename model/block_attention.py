"""Attention of queries to one block of the keys, with its log-sum-exp, and its gradients."""

# [Note: attention in parts]
# Softmax over keys that arrive block by block: each block gives an output O and the log-sum-exp L
# of its scores. Two blocks merge in fp32: L = logaddexp(L1, L2), O = e^(L1-L) O1 + e^(L2-L) O2.
# Backward needs only O and L over all keys, from which it computes a block's exact gradients.
#
# Kernels disagree on which keys a causal mask hides if there are more keys than queries. So only
# squares are causal here; rectangles have no mask. Keys may have fewer heads than queries.

# [Note: kernels of parts]
# On GPUs FlashAttention computes parts, or cuDNN if torch prefers cuDNN for whole samples. Both
# return the log-sum-exp in one form, and backward of either accepts the other's. cuDNN makes a plan
# for each new shape, and documents have any shape. cuDNN may give NaN for scores far below 0 if the
# last tile of queries or keys is partial, unless a causal mask hides the rest. So cuDNN computes
# squares, and rectangles of full tiles, only without documents.

# [Note: documents in one call]
# FlashAttention (16-bit types, GPU) takes all documents of a micro-batch in one varlen call. The
# documents' bounds are copied to the GPU from pinned memory, so that the host does not wait. On
# other devices and types there is one call per document. Neither way needs a mask, or computes
# scores between documents.

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from model.attention import (
    FLASH_CAPABILITY,
    QKV,
    Documents,
    SavedAttention,
    attend,
    chosen_kernel,
    documents_of,
)
from model.config import BLOCK_BACKENDS, AttentionBackend, LlamaConfig, flash_takes
from paro.errors import UserError

_NAMES = {
    SDPBackend.FLASH_ATTENTION: "FlashAttention",
    SDPBackend.EFFICIENT_ATTENTION: "torch's memory-efficient kernel",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.MATH: "matrix products and a softmax",
}
_PROBE_TOKENS = 128
TILE = 128  # queries or keys in a tile of cuDNN's kernels
_CUDNN_GPUS = (9, 0), (10, 0), (10, 3)  # Hopper, large Blackwell: torch prefers cuDNN there
_OLDEST_CUDNN, _CUDNN_HEAD = 91501, 128  # from 9.15.1 torch prefers cuDNN; largest head size


class Gpu(NamedTuple):
    """The properties of a GPU that decide which kernel computes attention in parts."""

    capability: tuple[int, int]
    cudnn: int  # version of the loaded cuDNN, 91501 for 9.15.1; 0: none that torch accepts

    @property
    def takes_cudnn(self) -> bool:
        """Tell whether torch prefers cuDNN's attention to FlashAttention on the device."""
        return self.capability in _CUDNN_GPUS and self.cudnn >= _OLDEST_CUDNN

    def block_kernel(self, head_size: int, queries: int, keys: int, *, causal: bool) -> SDPBackend:
        """Return the kernel of attention to a block of keys, without documents."""
        fits = queries % TILE == keys % TILE == 0 or (causal and queries > 1)
        if self.takes_cudnn and head_size <= _CUDNN_HEAD and fits:
            return SDPBackend.CUDNN_ATTENTION
        return SDPBackend.FLASH_ATTENTION


@cache
def gpu_of(device: torch.device) -> Gpu:
    """Return the compute capability of the GPU and the version of the loaded cuDNN."""
    try:
        cudnn = torch.backends.cudnn.version()
    except RuntimeError:  # older than the one that torch was built with
        cudnn = None
    return Gpu(torch.cuda.get_device_capability(device), cudnn or 0)


class AttentionKernels(NamedTuple):
    """Kernels of causal attention to whole samples, with log-sum-exp (parts), within documents."""

    whole: SDPBackend
    parts: SDPBackend  # a kernel that returns the log-sum-exp; `whole` if no kernel does
    documents: SDPBackend


def kernels_of(qkv: QKV, backend: AttentionBackend) -> AttentionKernels:
    """Return the kernels that compute attention of queries, keys and values of these shapes."""
    q, k, _ = qkv
    whole, parts = chosen_kernel(qkv, backend), _block_kernel(q, k, True, backend == "flash")
    takes = backend in BLOCK_BACKENDS and flash_takes(q.itemsize, q.shape[-1])
    if parts is None or not takes or gpu_of(q.device).capability < FLASH_CAPABILITY:
        return AttentionKernels(whole, whole, whole)
    return AttentionKernels(whole, parts, SDPBackend.FLASH_ATTENTION)


class PartialAttention(NamedTuple):
    """Attention to some of the keys: output, and log-sum-exp of the scaled scores in fp32."""

    out_BSNH: Tensor  # noqa: N815
    lse_BSN: Tensor  # noqa: N815

    def of(self, *at: slice) -> PartialAttention:
        """Return views of some samples, queries and heads."""
        return PartialAttention(self.out_BSNH[at], self.lse_BSN[at])

    def merge_(self, other: PartialAttention) -> None:
        """Merge `other` in place: attention to the keys of both; this output must be fp32."""
        share_BSN = torch.sigmoid(other.lse_BSN - self.lse_BSN)
        self.out_BSNH.lerp_(other.out_BSNH.float(), share_BSN[..., None])
        self.lse_BSN.copy_(torch.logaddexp(self.lse_BSN, other.lse_BSN))


def attend_block(qkv: QKV, *, causal: bool = False, flash: bool = False) -> PartialAttention:
    """Compute attention to a block of keys, by cuDNN unless `flash`; `causal` masks a square."""
    q_BSNH, k_BSKH, _ = qkv
    tensors = _heads_first(*qkv)
    kernel = _block_kernel(q_BSNH, k_BSKH, causal, flash)
    if kernel is None:
        result = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*tensors, 0.0, causal)
        return PartialAttention(*_heads_first(*result))
    if kernel == SDPBackend.CUDNN_ATTENTION:
        attention = torch.ops.aten._scaled_dot_product_cudnn_attention
        out_BNSH, lse_BNS1, *_ = attention(*tensors, None, True, 0.0, causal)
        return PartialAttention(*_heads_first(out_BNSH, lse_BNS1.squeeze(-1)))
    lengths = None, None, q_BSNH.shape[1], k_BSKH.shape[1]
    out_BSNH, lse_BNS = _flash(*qkv, *lengths, causal)
    return PartialAttention(out_BSNH, lse_BNS.transpose(1, 2))


def block_grads(
    grad_BSNH: Tensor,
    qkv: QKV,
    whole: PartialAttention,
    *,
    causal: bool = False,
    flash: bool = False,
) -> QKV:
    """Compute a block's share of the gradients; `whole` is attention to all keys."""
    q_BSNH, k_BSKH, _ = qkv
    lengths = None, None, q_BSNH.shape[1], k_BSKH.shape[1]
    lse_BNS, kernel = whole.lse_BSN.transpose(1, 2), _block_kernel(q_BSNH, k_BSKH, causal, flash)
    if kernel is None:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *_heads_first(grad_BSNH, *qkv, whole.out_BSNH), lse_BNS, 0.0, causal
        )
    elif kernel == SDPBackend.FLASH_ATTENTION:
        of_all_keys = whole.out_BSNH, lse_BNS.contiguous()
        return _flash_grads(grad_BSNH, *qkv, *of_all_keys, *lengths, causal)
    else:
        # torch looks up cuDNN plans by shapes and strides of q, k and v alone, so strides of other
        # tensors must not vary. A copy of the log-sum-exp has the alignment that cuDNN needs.
        lse_BNS1 = lse_BNS.clone(memory_format=torch.contiguous_format)[..., None]
        tensors = _heads_first(grad_BSNH.contiguous(), *qkv, whole.out_BSNH.contiguous())
        unused = torch.zeros((), dtype=torch.int64, device=q_BSNH.device)  # as in `_flash_grads`
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *tensors, lse_BNS1, unused, unused, None, *lengths, 0.0, causal
        )
    dq, dk, dv = _heads_first(*grads)
    return dq, dk, dv


class CausalAttention(NamedTuple):
    """Causal attention within each sample or, given documents, within each document."""

    documents: Documents | None
    flash: bool = False

    def attend(self, qkv: QKV) -> PartialAttention:
        """Compute the output and the log-sum-exp."""
        documents, (q_BSNH, _, _) = self.documents, qkv
        if documents is None:
            return attend_block(qkv, causal=True, flash=self.flash)
        flat = [part.flatten(0, 1) for part in qkv]
        if documents.bounds_N is not None:
            out_TNH, lse_NT = _flash(*flat, *_bounds(documents), True)
            return PartialAttention(out_TNH.view_as(q_BSNH), lse_NT.t().reshape(q_BSNH.shape[:3]))
        apart = zip(*(part[None].split(documents.lengths, 1) for part in flat), strict=True)
        parts = [attend_block(of_document, causal=True, flash=True) for of_document in apart]
        outs, lses = zip(*parts, strict=True)
        lse_BSN = torch.cat(lses, 1).view(q_BSNH.shape[:3])
        return PartialAttention(torch.cat(outs, 1).view_as(q_BSNH), lse_BSN)

    def grads(self, grad_BSNH: Tensor, qkv: QKV, whole: PartialAttention) -> QKV:
        """Compute the gradients of queries, keys and values; `whole` is the result of `attend`."""
        documents, (q_BSNH, k_BSKH, v_BSKH) = self.documents, qkv
        if documents is None:
            return block_grads(grad_BSNH, qkv, whole, causal=True, flash=self.flash)
        flat = [part.flatten(0, 1) for part in (grad_BSNH, *qkv, *whole)]
        if documents.bounds_N is not None:
            lse_NT = flat.pop().t().contiguous()
            dq, dk, dv = _flash_grads(*flat, lse_NT, *_bounds(documents), True)
        else:
            apart = zip(*(part[None].split(documents.lengths, 1) for part in flat), strict=True)
            parts = [
                block_grads(grad, (q, k, v), PartialAttention(out, lse), causal=True, flash=True)
                for grad, q, k, v, out, lse in apart
            ]
            dq, dk, dv = (torch.cat(grads, 1) for grads in zip(*parts, strict=True))
        return dq.view_as(q_BSNH), dk.view_as(k_BSKH), dv.view_as(v_BSKH)


def attend_saving(
    backend: AttentionBackend, qkv: QKV, documents: Documents | None, saved: SavedAttention | None
) -> Tensor:
    """Compute causal attention within each document, or take its output from `saved`."""
    q_BSNH, *_ = qkv
    bounded = documents is not None and documents.bounds_N is not None
    in_one_call = bounded and flash_takes(q_BSNH.itemsize, q_BSNH.shape[-1])
    if saved is None and not (in_one_call and backend in BLOCK_BACKENDS):
        return attend(qkv, backend, documents)
    attention = CausalAttention(documents, backend == "flash")
    return attend_by(attention.attend, attention.grads, saved, *qkv)


def attend_by(
    attend: Callable[[Any], PartialAttention],
    grads: Callable[[Tensor, Any, PartialAttention], tuple[Tensor, ...]],
    saved: SavedAttention | None,
    *tensors: Tensor,
) -> Tensor:
    """Return the output of `attend(tensors)`, or take it from `saved`.

    Backward computes `grads(grad, tensors, whole)` from the output and the log-sum-exp.
    """
    return _AttendBy.apply(attend, grads, saved, *tensors)


class _AttendBy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, attend: Any, grads: Any, saved: SavedAttention | None, *tensors: Tensor
    ) -> Tensor:
        whole = attend(tensors) if saved is None else saved.output_of(partial(attend, tensors))
        ctx.grads = grads
        ctx.save_for_backward(*tensors, *whole)
        out_BSNH, _ = whole
        return out_BSNH

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out_BSNH, lse_BSN = ctx.saved_tensors
        return None, None, None, *ctx.grads(grads[0], tensors, PartialAttention(out_BSNH, lse_BSN))


def check_attention(
    config: LlamaConfig, dtype: torch.dtype, device: torch.device, *, documents: bool = False
) -> str:
    """Name the kernel of attention, in words; `UserError` if the chosen one cannot compute.

    A short sample of the model's heads is computed forward and backward; with `documents`, two that
    are kept apart.
    """
    backend = config.attention_backend
    options: dict[str, Any] = {"dtype": dtype, "device": device, "requires_grad": True}
    heads = config.num_attention_heads, config.num_query_groups, config.num_query_groups
    q, k, v = (torch.zeros(1, _PROBE_TOKENS, n, config.kv_channels, **options) for n in heads)
    qkv = q, k, v
    kernels = kernels_of(qkv, backend)
    chosen = kernels.parts if config.keeps_core else kernels.whole
    chosen = kernels.documents if documents else chosen
    name = _NAMES.get(chosen, "another kernel")
    words = f"{backend}, {name}"
    if backend == "auto":
        words = f"auto, for these heads {name}"
        if chosen == SDPBackend.MATH:
            words += (
                ", which keep all scores: the predicted memory counts them with "
                "--attention-backend unfused"
            )
    is_flash = backend == "auto" and chosen == SDPBackend.FLASH_ATTENTION and not documents
    gpu = gpu_of(device) if device.type == "cuda" and is_flash else None
    if gpu is not None and gpu.capability in _CUDNN_GPUS and not gpu.takes_cudnn:
        words += "; WARNING: cuDNN 9.15.1 is faster; an older one is loaded: see LD_LIBRARY_PATH"
    half = _PROBE_TOKENS // 2
    lengths = documents_of((half, half) if documents else None, 1, device)
    try:
        saved = SavedAttention() if config.keeps_core else None
        attend_saving(backend, qkv, lengths, saved).sum().backward()
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


def _flash_grads(*args: Any) -> QKV:
    *tensors, causal = args
    # The state of a random generator, which nothing reads without dropout.
    unused = torch.zeros(2, dtype=torch.uint64, device=args[0].device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(*tensors, 0.0, causal, unused, unused)
    return dq, dk, dv


def _block_kernel(q: Tensor, k: Tensor, causal: bool, flash: bool) -> SDPBackend | None:
    """Return the kernel of a block on a GPU; None on a CPU, which has only one kernel."""
    assert not causal or q.shape[1] == k.shape[1], "a causal block that is no square"
    if flash or not q.is_cuda:
        return SDPBackend.FLASH_ATTENTION if q.is_cuda else None
    return gpu_of(q.device).block_kernel(q.shape[-1], q.shape[1], k.shape[1], causal=causal)


def _bounds(documents: Documents) -> tuple[Tensor, Tensor, int, int]:
    bounds_N, longest = documents.bounds_N, max(documents.lengths)
    assert bounds_N is not None
    return bounds_N, bounds_N, longest, longest


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return views with tokens and heads exchanged."""
    return tuple(tensor.transpose(1, 2) for tensor in tensors)
