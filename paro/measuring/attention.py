"""The rate of attention's products without weights, timed alone, for the sequence to plan for."""

# Attention's share of a step grows with the sequence, and its kernels have a rate of their own: a
# rate of all that a model computes holds only for sequences of the length with which it was timed.

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from model.attention import attend, chosen_kernel
from model.config import LlamaConfig
from paro.config.run import RunConfig
from paro.sharding.buffers import TORCH_TYPES

_SECONDS = 0.4  # of a sample longer than those of a micro-batch, about
_MULTIPLE = 16  # of its tokens
_FLOPS = 12  # of two tokens and a channel: two products in forward, and twice as many in backward


class AttentionRates(NamedTuple):
    """FLOP/s of forward and backward, counted in full as in paro/planning/step/computing.py."""

    of_micro_batch: float
    of_sequence: float


def attention_rates(
    config: RunConfig,
    sequence: int,
    device: torch.device,
    median: Callable[[Callable[[], object]], float],
) -> AttentionRates:
    """Those of a micro-batch, and of a sample of `sequence` tokens, or as many as take 0.4 s.

    Of that sample no more key heads are computed, with their queries, than the time allows. Where
    kernels keep all scores, which might not fit, the micro-batch's rate is both. `median` gives the
    seconds of an action, the same on all ranks.
    """
    model, kind = config.model, TORCH_TYPES[config.precision.compute]

    def rate(size: int, length: int, kv_heads: int, calls: int) -> float:
        q, k, v = leaves = _leaves(model, kv_heads, torch.empty(size, length, 0).to(device, kind))

        def action() -> None:
            for _ in range(calls):
                out = attend(q, k, v, model.attention_backend)
                torch.autograd.grad(out, leaves, out.detach())

        return calls * _FLOPS * q.numel() * length / median(action)

    length, kv_heads = config.data.seq_length, model.num_query_groups
    own = rate(config.batches.micro_batch_size, length, kv_heads, model.num_layers)
    channels = model.kv_channels * model.num_attention_heads // kv_heads  # of a key head's queries
    in_time = own * _SECONDS / (_FLOPS * channels)  # pairs of tokens, of one key head
    longest = min(sequence, int(math.sqrt(in_time)) // _MULTIPLE * _MULTIPLE)
    few = _leaves(model, kv_heads, torch.empty(1, _MULTIPLE, 0).to(device, kind))
    if longest <= length or chosen_kernel(*few, model.attention_backend) == SDPBackend.MATH:
        return AttentionRates(own, own)
    return AttentionRates(own, rate(1, longest, min(kv_heads, int(in_time / longest**2)), 1))


def _leaves(model: LlamaConfig, kv_heads: int, like_BS0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of random numbers: of equal ones a GPU computes faster."""
    generator = torch.Generator(like_BS0.device).manual_seed(0)

    def leaf(heads: int) -> Tensor:
        shape = *like_BS0.shape[:2], heads, model.kv_channels
        return like_BS0.new_empty(shape).normal_(generator=generator).requires_grad_()

    per_key = model.num_attention_heads // model.num_query_groups
    return leaf(kv_heads * per_key), leaf(kv_heads), leaf(kv_heads)
