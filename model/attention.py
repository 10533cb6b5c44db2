"""Causal attention by a chosen kernel; documents that share a sample are kept apart."""

# [Note: documents in one call]
# torch's variable-length attention takes all documents of a micro-batch at once. It is
# FlashAttention, for 16-bit types on a GPU, and needs the documents' bounds there: they are copied
# from page-locked memory, so that nothing waits. Elsewhere there is one call per document. Neither
# needs a mask, or computes scores that a mask would hide.

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from model.config import AttentionBackend, LlamaConfig, flash_takes
from model.kept import KeptAttention
from paro.errors import UserError

_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "fused": SDPBackend.CUDNN_ATTENTION,
    "unfused": SDPBackend.MATH,
    "local": SDPBackend.MATH,
}
_NAMES = {
    SDPBackend.FLASH_ATTENTION: "FlashAttention",
    SDPBackend.EFFICIENT_ATTENTION: "torch's memory-efficient kernel",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.MATH: "matrix products and a softmax",
}
_FLASH_CAPABILITY = 8, 0
_PROBE_TOKENS = 128

Varlen = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


class Documents(NamedTuple):
    """The documents of a micro-batch, sample after sample."""

    lengths: tuple[int, ...]
    bounds_N: Tensor | None = None  # noqa: N815  int32, with 0 and the end; only for one call


# Causal attention within documents, of rotated q_BSNH and k_BSKH, and v_BSKH; returns [B, S, N, H].
Core = Callable[[Tensor, Tensor, Tensor, Documents | None, KeptAttention | None], Tensor]


def documents_of(
    lengths: tuple[int, ...] | None, num_samples: int, device: torch.device
) -> Documents | None:
    """None if every sample is one document."""
    if lengths is None or len(lengths) == num_samples:
        return None
    if device.type != "cuda":
        return Documents(lengths)
    bounds_N = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return Documents(lengths, bounds_N.pin_memory().to(device, non_blocking=True))


def attend(
    q_BSNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    backend: AttentionBackend = "auto",
    documents: Documents | None = None,
) -> Tensor:
    """Causal scaled dot-product attention within each document; returns [B, S, N, H]."""
    if documents is None:
        return _attend(q_BSNH, k_BSKH, v_BSKH, backend)
    flat = [part.flatten(0, 1) for part in (q_BSNH, k_BSKH, v_BSKH)]
    if documents.bounds_N is not None and (varlen := varlen_for(q_BSNH, backend)) is not None:
        out_TNH = varlen(flat[0], flat[1], flat[2], documents.bounds_N, max(documents.lengths))
        return out_TNH.view_as(q_BSNH)
    parts = [part.split(documents.lengths) for part in flat]
    outs = [_attend(q[None], k[None], v[None], backend)[0] for q, k, v in zip(*parts, strict=True)]
    return torch.cat(outs).view_as(q_BSNH)


def _attend(q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, backend: AttentionBackend) -> Tensor:
    q_BNSH, k_BKSH, v_BKSH = (part.transpose(1, 2) for part in (q_BSNH, k_BSKH, v_BSKH))
    grouped = q_BNSH.shape[1] != k_BKSH.shape[1]
    with nullcontext() if backend == "auto" else sdpa_kernel(_KERNELS[backend]):
        out_BNSH = F.scaled_dot_product_attention(
            q_BNSH, k_BKSH, v_BKSH, is_causal=True, enable_gqa=grouped
        )
    return out_BNSH.transpose(1, 2)


def varlen_for(q_BSNH: Tensor, backend: AttentionBackend) -> Varlen | None:
    """Attention to all documents in one call, where torch has it for such queries."""
    takes = (
        q_BSNH.device.type == "cuda"
        and backend in ("auto", "flash")
        and flash_takes(q_BSNH.itemsize, q_BSNH.shape[-1])
    )
    return _find_varlen(q_BSNH.device) if takes else None


@cache
def _find_varlen(device: torch.device) -> Varlen | None:
    if torch.cuda.get_device_capability(device) < _FLASH_CAPABILITY:
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return as_varlen(varlen_attn, device)


def as_varlen(varlen_attn: Callable[..., Any], device: torch.device) -> Varlen:
    """torch's function as called here: its parameters differ between 2.11 and 2.13.

    That of 2.11 has no word for grouped heads; whether it takes them is tried.
    """
    names = inspect.signature(varlen_attn).parameters
    causal = {"is_causal": True} if "is_causal" in names else {"window_size": (-1, 0)}
    has_word = "enable_gqa" in names

    def run(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, bounds_N: Tensor, longest: int) -> Tensor:
        options: dict[str, Any] = dict(causal)
        if has_word:
            options["enable_gqa"] = q_TNH.shape[1] > k_TKH.shape[1]
        out: Tensor = varlen_attn(
            q_TNH, k_TKH, v_TKH, bounds_N, bounds_N, longest, longest, **options
        )
        return out

    def run_repeating(
        q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, bounds_N: Tensor, longest: int
    ) -> Tensor:
        group_size = q_TNH.shape[1] // k_TKH.shape[1]
        if group_size > 1:
            k_TKH, v_TKH = (part.repeat_interleave(group_size, 1) for part in (k_TKH, v_TKH))
        return run(q_TNH, k_TKH, v_TKH, bounds_N, longest)

    return run if has_word or _agree(run, run_repeating, device) else run_repeating


def _agree(one: Varlen, other: Varlen, device: torch.device) -> bool:
    """Whether two functions attend alike with grouped heads, forward and backward."""
    bounds_N = torch.tensor([0, 5, 8], dtype=torch.int32, device=device)
    leaves = [
        torch.linspace(-2.0, 2.0, 8 * heads * 8, device=device).sin().view(8, heads, 8)
        for heads in (4, 2, 2)
    ]
    found = []
    for run in (one, other):
        q_TNH, k_TKH, v_TKH = (leaf.bfloat16().requires_grad_() for leaf in leaves)
        try:
            out_TNH = run(q_TNH, k_TKH, v_TKH, bounds_N, 5)
            out_TNH.backward(q_TNH.detach())
        except (RuntimeError, ValueError):
            return False
        grads = (q_TNH.grad, k_TKH.grad, v_TKH.grad)
        found.append(torch.cat([each.flatten() for each in (out_TNH, *grads) if each is not None]))
    return torch.allclose(found[0], found[1], atol=2.0**-5)


def chosen_kernel(
    q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, backend: AttentionBackend
) -> SDPBackend:
    """The kernel that computes attention of them, without documents."""
    if backend != "auto":
        return _KERNELS[backend]
    grouped = q_BSNH.shape[2] != k_BSKH.shape[2]
    q, k, v = (part.transpose(1, 2) for part in (q_BSNH, k_BSKH, v_BSKH))
    return SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=grouped))


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
        if chosen is SDPBackend.MATH:
            words += (
                ", which keep all scores: the predicted memory counts them with "
                "--attention-backend unfused"
            )
    half = _PROBE_TOKENS // 2
    lengths = documents_of((half, half) if documents else None, 1, device)
    try:
        attend(q_BSNH, k_BSKH, v_BSKH, backend, lengths).sum().backward()
    except RuntimeError as error:
        kind = str(dtype).removeprefix("torch.")
        raise UserError(
            f"--attention-backend {backend}: {name} does not compute heads of "
            f"{config.kv_channels} channels in {kind} on this {device.type}: give "
            f"{'unfused' if backend == 'auto' else 'auto'}, or another"
        ) from error
    return words
