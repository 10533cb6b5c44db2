"""The FLOP/s of core attention, timed alone, at the sequence length to plan for."""

# Core attention (no products with weights) takes a share of a step that grows with the sequence,
# and its kernels run at FLOP/s of their own. One FLOP/s figure for a whole model would hold only
# for the sequence length with which it was timed, so core attention is timed apart.

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from model.attention import QKV, SavedAttention, documents_of
from model.block_attention import AttentionKernels, attend_saving, kernels_of
from model.config import LlamaConfig
from paro.distributed.control import Control
from paro.sharding.buffers import TORCH_TYPES
from paro.spec.run_spec import RunSpec

_SECONDS = 0.4  # about the time for a sample longer than those of the micro-batch
_MULTIPLE = 16  # a multiple of the number of tokens of such a sample
_FLOPS = 12  # per pair of tokens and channel: two products in forward, four in backward


class AttentionRates(NamedTuple):
    """FLOP/s of forward and backward, counted in full as in paro/planning/computing.py."""

    of_micro_batch: float  # samples of the micro-batch, by the kernel of training on one rank
    of_sequence: float  # a sample of the sequence length to plan for
    of_parts: float  # such a sample by the kernel for parts, or for outputs saved in recomputation
    of_documents: float  # such a sample by the kernel for attention within documents


def attention_rates(
    run: RunSpec, sequence: int, control: Control, median: Callable[[Callable[[], object]], float]
) -> AttentionRates:
    """Time attention of a micro-batch, and of a sample of `sequence` tokens; collective.

    The sample takes about 0.4 s: only so many key heads are computed, with their queries. Where
    kernels save all scores, which might not fit, the micro-batch's rate stands for both. `median`
    returns the seconds of an action, equal on all ranks.
    """
    model, kind, device = run.model, TORCH_TYPES[run.precision.compute], control.device

    def rate(way: str, size: int, length: int, kv_heads: int, calls: int) -> float:
        qkv = _leaves(model, kv_heads, torch.empty(size, length, 0).to(device, kind))
        apart = (length - 1, 1) * size if way == "documents" else None  # nearly whole samples
        documents = documents_of(apart, size, device)

        def action() -> None:
            for _ in range(calls):
                saved = SavedAttention() if way == "parts" else None
                out = attend_saving(model.attention_backend, qkv, documents, saved)
                torch.autograd.grad(out, qkv, out.detach())

        return calls * _FLOPS * qkv[0].numel() * length / median(action)

    length, kv_heads = run.seq_length, model.num_query_groups
    sizes = run.micro_batch_size, length, kv_heads, model.num_layers
    alone = "parts" if model.keeps_core else "whole"
    of_micro_batch = rate(alone, *sizes)
    channels = model.kv_channels * model.num_attention_heads // kv_heads  # queries of one key head
    in_time = of_micro_batch * _SECONDS / (_FLOPS * channels)  # pairs of tokens, of one key head
    longest = min(sequence, int(math.sqrt(in_time)) // _MULTIPLE * _MULTIPLE)
    few = _leaves(model, kv_heads, torch.empty(1, _MULTIPLE, 0).to(device, kind))
    names = control.gather([kernel.name for kernel in kernels_of(few, model.attention_backend)])
    kernels = dict(zip(AttentionKernels._fields, names[0], strict=True))  # all ranks time as often
    timed = {kernels[alone]: of_micro_batch}
    if longest > length and kernels["whole"] != SDPBackend.MATH.name:
        timed, sizes = {}, (1, longest, min(kv_heads, int(in_time / longest**2)), 1)
    for way, kernel in kernels.items():
        if kernel not in timed:
            timed[kernel] = rate(way, *sizes)
    return AttentionRates(of_micro_batch, *(timed[kernel] for kernel in kernels.values()))


def _leaves(model: LlamaConfig, kv_heads: int, like_BS0: Tensor) -> QKV:
    """Draw random queries, keys and values: with constant numbers a GPU would compute faster."""
    generator = torch.Generator(like_BS0.device).manual_seed(0)

    def leaf(heads: int) -> Tensor:
        shape = *like_BS0.shape[:2], heads, model.kv_channels
        return like_BS0.new_empty(shape).normal_(generator=generator).requires_grad_()

    per_key = model.num_attention_heads // model.num_query_groups
    return leaf(kv_heads * per_key), leaf(kv_heads), leaf(kv_heads)
