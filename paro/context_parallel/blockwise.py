"""Blockwise attention: a rank's queries attend to the keys of each rank of a ring, in turn."""

# Ring attention (and Megatron's all-gather of keys and values) as an autograd function. A
# `KVExchange` brings the keys and values of each ring rank; attention to them is a partial output
# with a log-sum-exp, merged as in flash attention. Only this rank's keys and values are saved for
# backward, which exchanges them again. A recomputed forward whose attention output was saved
# exchanges nothing. Outputs and all gradients are summed in fp32. Letters of tensors: B samples, T
# tokens on this rank, N query heads, K key and value heads, H head size; keys and values of a rank
# are one tensor [2, B, T, K, H].

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from types import EllipsisType
from typing import Any, Protocol

import torch
from torch import Tensor

from model.attention import Core, Documents, documents_of
from model.block_attention import Partial, attend_block, attend_causally, block_grads, causal_grads
from model.config import AttentionBackend
from model.recompute import AttentionOutput, SavedAttention
from paro.context_parallel.mask import Bounds, bounds_of, mask_block, own_lengths
from paro.spec.context_layout import heads_at_first

Attend = Callable[[int, Tensor], None]  # (ring rank, its keys and values): attend to them
AddGrads = Callable[[Tensor], None]  # (fp32 tensor): add gradients of keys and values to it
# (ring rank, keys and values of some of its heads, first of these heads): compute their gradients.
GradsOf = Callable[[int, Tensor, int], AddGrads]


class KVExchange(Protocol):
    """Exchange of keys and values among the ranks of a ring, and of their gradients.

    All ranks call it in the same order. The number and sizes of messages depend on shapes alone.
    """

    ring_rank: int
    ring_size: int

    def exchange_kv(self, own_2BTKH: Tensor, attend: Attend) -> None:
        """Call `attend(ring_rank, kv)` for every ring rank, this rank first.

        A tensor is valid only during the call that gets it.
        """

    def exchange_kv_and_grads(self, own_2BTKH: Tensor, grads_of: GradsOf) -> Tensor:
        """Call `grads_of` for every ring rank and head; return the sum of this rank's gradients.

        This rank's own share is computed in two parts, the second while the last sums are sent.
        """


def blockwise_attention(exchange: KVExchange, backend: AttentionBackend = "auto") -> Core:
    """Return causal attention, within documents, of a rank's tokens: two zigzag chunks of a sample.

    Documents are given for entire samples. `backend` chooses the kernel.
    """

    def attend(
        q_BTNH: Tensor,
        k_BTKH: Tensor,
        v_BTKH: Tensor,
        documents: Documents | None,
        saved: SavedAttention | None,
    ) -> Tensor:
        mask = _Mask(documents, q_BTNH, exchange, backend)
        out: Tensor = _BlockwiseAttention.apply(exchange, mask, saved, q_BTNH, k_BTKH, v_BTKH)
        return out

    return attend


def in_two(own_2BTKH: Tensor) -> tuple[tuple[EllipsisType | slice, ...], ...]:
    """Return the index of each part of a rank's own share, by heads; the second may be empty."""
    heads = heads_at_first(own_2BTKH.shape[3], own_2BTKH.element_size())
    return (..., slice(heads), slice(None)), (..., slice(heads, None), slice(None))


class _Mask:
    """The keys to which a rank's queries attend, and the kernel of their attention."""

    def __init__(
        self,
        documents: Documents | None,
        q_BTNH: Tensor,
        exchange: KVExchange,
        backend: AttentionBackend,
    ) -> None:
        # Documents give blocks of any size, and cuDNN would make a plan for each size.
        self.flash = documents is not None or backend == "flash"
        self._ring_rank, self._ring_size = exchange.ring_rank, exchange.ring_size
        seq_length = q_BTNH.shape[1] * exchange.ring_size
        self._samples: Sequence[tuple[slice, Bounds]] = [(slice(None), (0, seq_length))]
        self.own_documents: Documents | None = None
        if documents is not None:
            bounds = bounds_of(documents.lengths, seq_length)
            self._samples = [
                (slice(number, number + 1), sample) for number, sample in enumerate(bounds)
            ]
            self.own_documents = _own_documents(
                bounds, self._ring_rank, self._ring_size, q_BTNH.device
            )

    def blocks(self, source: int) -> Iterator[tuple[slice, slice, slice]]:
        """Yield samples, queries and the keys of another ring rank to which they attend."""
        for samples, bounds in self._samples:
            block = mask_block(bounds, self._ring_rank, source, self._ring_size)
            if block is not None:
                yield samples, *block


@lru_cache(maxsize=4)  # all blocks of a micro-batch have equal arguments
def _own_documents(
    bounds: Sequence[Bounds], ring_rank: int, ring_size: int, device: torch.device
) -> Documents | None:
    lengths = [length for sample in bounds for length in own_lengths(sample, ring_rank, ring_size)]
    return documents_of(tuple(lengths), len(bounds), device)


class _BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        exchange: KVExchange,
        mask: _Mask,
        saved: SavedAttention | None,
        q_BTNH: Tensor,
        k_BTKH: Tensor,
        v_BTKH: Tensor,
    ) -> Tensor:
        q_BTNH = q_BTNH.contiguous()  # a saved view would keep the entire message of heads
        own_2BTKH = torch.stack((k_BTKH, v_BTKH))

        def attend() -> AttentionOutput:
            return _attended(exchange, mask, q_BTNH, own_2BTKH)

        whole = attend() if saved is None else saved.output_of(attend)
        ctx.exchange, ctx.mask = exchange, mask
        ctx.save_for_backward(q_BTNH, own_2BTKH, *whole)
        return whole[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_BTNH, own_2BTKH, *saved = ctx.saved_tensors
        grad_BTNH, whole, mask = grads[0].contiguous(), Partial(*saved), ctx.mask
        dq_BTNH: list[Tensor] = []  # allocated after the kernel's buffers are freed
        group = q_BTNH.shape[2] // own_2BTKH.shape[3]  # query heads per KV head

        def grads_of(source: int, kv_2BTKH: Tensor, first: int) -> AddGrads:
            shares = []
            heads = slice(group * first, group * (first + kv_2BTKH.shape[3]))

            def compute(samples: slice, queries: slice, keys: slice, *, own: bool) -> None:
                at = samples, queries, heads
                k, v = kv_2BTKH[:, samples, keys]
                block = grad_BTNH[at], q_BTNH[at], k, v, whole.of(*at)
                share = partial(causal_grads, documents=mask.own_documents) if own else block_grads
                dq, *dkv = share(*block, flash=mask.flash)
                if not dq_BTNH:
                    dq_BTNH.append(torch.zeros_like(q_BTNH, dtype=torch.float32))
                dq_BTNH[0][at] += dq
                shares.append((samples, keys, dkv))

            if source == ctx.exchange.ring_rank:
                if heads.start < heads.stop:  # with one head the second part is empty
                    compute(slice(None), slice(None), slice(None), own=True)
            else:
                for block in mask.blocks(source):
                    compute(*block, own=False)

            def add(total_2BTKH: Tensor) -> None:
                for samples, keys, dkv in shares:
                    for total, part in zip(total_2BTKH[:, samples, keys], dkv, strict=True):
                        total += part

            return add

        dkv_2BTKH = ctx.exchange.exchange_kv_and_grads(own_2BTKH, grads_of).to(own_2BTKH.dtype)
        return None, None, None, dq_BTNH[0].to(q_BTNH.dtype), *dkv_2BTKH


def _attended(
    exchange: KVExchange, mask: _Mask, q_BTNH: Tensor, own_2BTKH: Tensor
) -> AttentionOutput:
    """Return attention to the keys of all ranks of the ring."""
    merged: list[Partial] = []

    def attend(source: int, kv_2BTKH: Tensor) -> None:
        if source == exchange.ring_rank:
            own = attend_causally(q_BTNH, kv_2BTKH[0], kv_2BTKH[1], mask.own_documents, mask.flash)
            merged.append(Partial(own.out_BSNH.float(), own.lse_BSN))
            return
        for samples, queries, keys in mask.blocks(source):
            k, v = kv_2BTKH[:, samples, keys]
            part = attend_block(q_BTNH[samples, queries], k, v, flash=mask.flash)
            merged[0].of(samples, queries).merge_(part)

    exchange.exchange_kv(own_2BTKH, attend)
    return merged[0].out_BSNH.to(q_BTNH.dtype), merged[0].lse_BSN
