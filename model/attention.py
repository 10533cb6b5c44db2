"""Causal attention by a chosen kernel; documents that share a sample are kept apart."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from model.config import AttentionBackend

_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "fused": SDPBackend.CUDNN_ATTENTION,
    "unfused": SDPBackend.MATH,
    "local": SDPBackend.MATH,
}
FLASH_CAPABILITY = 8, 0

AttentionOutput = tuple[Tensor, Tensor]  # an output, and the log-sum-exp of its scores


class Documents(NamedTuple):
    """The lengths of a micro-batch's documents, sample after sample."""

    lengths: tuple[int, ...]
    bounds_N: Tensor | None = None  # noqa: N815  cu_seqlens, int32; None: a call per document


class SavedAttention:
    """Outputs and log-sum-exps of attention in a function that backward recomputes.

    The first run saves the outputs. The second run, once `is_second_run` is set, takes them in
    order instead of computing attention; they then live as long as its other activations.
    """

    def __init__(self) -> None:
        self._outputs: deque[AttentionOutput] = deque()
        self.is_second_run = False

    def output_of(self, attend: Callable[[], AttentionOutput]) -> AttentionOutput:
        """Call `attend` and save its output; take a saved one instead in the second run."""
        if self.is_second_run:
            return self._outputs.popleft()
        out, lse = attend()
        self._outputs.append((out.detach(), lse))
        return out, lse


QKV = tuple[Tensor, Tensor, Tensor]  # q_BSNH, k_BSKH and v_BSKH, the first two rotated
# Causal attention within documents; returns [B, S, N, H].
Core = Callable[[QKV, Documents | None, SavedAttention | None], Tensor]


def documents_of(
    lengths: tuple[int, ...] | None, num_samples: int, device: torch.device
) -> Documents | None:
    """Build `Documents` of these lengths; None if every sample is one document."""
    if lengths is None or len(lengths) == num_samples:
        return None
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < FLASH_CAPABILITY:
        return Documents(lengths)
    bounds_N = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return Documents(lengths, bounds_N.pin_memory().to(device, non_blocking=True))


def attend(
    qkv: QKV, backend: AttentionBackend = "auto", documents: Documents | None = None
) -> Tensor:
    """Compute causal scaled dot-product attention [B, S, N, H], one call per document."""
    if documents is not None:
        flat = (part.flatten(0, 1).split(documents.lengths) for part in qkv)
        parts = zip(*flat, strict=True)
        outs = [attend((q[None], k[None], v[None]), backend)[0] for q, k, v in parts]
        return torch.cat(outs).view_as(qkv[0])
    q, k, v = (part.transpose(1, 2) for part in qkv)
    grouped = q.shape[1] != k.shape[1]
    with nullcontext() if backend == "auto" else sdpa_kernel(_KERNELS[backend]):
        out_BNSH = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return out_BNSH.transpose(1, 2)


def chosen_kernel(qkv: QKV, backend: AttentionBackend) -> SDPBackend:
    """Return the SDPA kernel for these queries, keys and values, without documents."""
    if backend != "auto":
        return _KERNELS[backend]
    q, k, v = (part.transpose(1, 2) for part in qkv)
    grouped = q.shape[1] != k.shape[1]
    return SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=grouped))
