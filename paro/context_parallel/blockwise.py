"""Blockwise (ring) attention: a rank's queries attend to the keys of each rank, one by one."""

# An autograd function for `ContextAttention`: p2p and allgather of --cp-comm-type. A `KVExchange`
# brings the keys and values of each ring rank; attention to them is a partial output with a
# log-sum-exp, merged as in flash attention. Only this rank's keys and values are saved for
# backward, which exchanges them again. With selective recomputation that saves attention's output
# the recomputed forward exchanges nothing. Outputs and gradients accumulate in fp32. Letters of
# tensors: B samples, T tokens on this rank, N query heads, K key and value heads, H head size; keys
# and values of a rank are one tensor [2, B, T, K, H].

# [Note: causal mask of a ring]
# The zigzag (load-balanced) layout of Megatron-LM: a sample is cut into 2R chunks, and ring rank p
# of R has chunks p and 2R - 1 - p, in this order. Ring rank 1's queries (rows) attend to these
# keys (columns) if R is 3 and a sample is one document; x is a full block of the mask, \ a causal
# one:
#
#     chunk   0  1  2  3  4  5
#         1   x  \
#         4   x  x  x  x  \
#
#     keys of ring rank 1, chunks 1 and 4    with its queries one causal block, chunks concatenated
#     keys of ring rank 0, chunks 0 and 5    a full block: all queries, keys of chunk 0
#     keys of ring rank 2, chunks 2 and 3    a full block: queries of chunk 4, all keys
#
# Documents cut the causal block into smaller ones: a document's tokens are neighbours among those
# of a rank even if the document is in both chunks. Of two ranks' tokens, only one document can have
# queries on one rank and earlier keys on the other: at most one full block of the mask.

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from model.attention import QKV, Core, Documents, SavedAttention, documents_of
from model.block_attention import (
    CausalAttention,
    PartialAttention,
    attend_block,
    attend_by,
    block_grads,
)
from model.config import AttentionBackend
from paro.spec.context_layout import ContextLayout

AttendTo = Callable[[int, Tensor], None]  # (ring rank, its keys and values): attend to them
AddGrads = Callable[[Tensor], None]  # (fp32 sum of previous ranks): add this rank's dKV to it
# (ring rank, keys and values of some of its heads, first of these heads): compute their gradients
# now, and return a function that adds them to the sum of previous ranks when it has arrived.
GradsOf = Callable[[int, Tensor, int], AddGrads]
Bounds = tuple[int, ...]  # first positions of the documents of a sample, and the sample's length


class KVExchange(Protocol):
    """Exchange of keys and values among the ranks of a ring, and of their gradients.

    All ranks call it in the same order. The number and sizes of messages depend on shapes alone.
    """

    ring_rank: int
    ring_size: int

    def exchange_kv(self, local_2BTKH: Tensor, attend: AttendTo) -> None:
        """Call `attend(ring_rank, kv)` for every ring rank, this rank first.

        `kv` is a receive buffer that is used again: `attend` must not keep it.
        """

    def exchange_kv_and_grads(self, local_2BTKH: Tensor, grads_of: GradsOf) -> Tensor:
        """Call `grads_of` for the keys and values of every ring rank, some heads at a time.

        Return the gradients of this rank's own keys and values, summed over all ranks of the ring.
        """


def blockwise_attention(exchange: KVExchange, backend: AttentionBackend = "auto") -> Core:
    """Return causal attention, within documents, of a rank's tokens: two zigzag chunks of a sample.

    Documents are given for entire samples. `backend` chooses the kernel.
    """

    def attend(qkv: QKV, documents: Documents | None, saved: SavedAttention | None) -> Tensor:
        q_BTNH, k_BTKH, v_BTKH = qkv
        blockwise = _Blockwise(exchange, backend, documents, q_BTNH)
        # A saved view of queries would keep the entire message of heads.
        tensors = q_BTNH.contiguous(), torch.stack((k_BTKH, v_BTKH))
        return attend_by(blockwise.attend, blockwise.grads, saved, *tensors)

    return attend


class _Blockwise:
    """Attention of a rank's queries [B, T, N, H] to the keys and values of all ring ranks."""

    def __init__(
        self,
        exchange: KVExchange,
        backend: AttentionBackend,
        documents: Documents | None,
        q_BTNH: Tensor,
    ) -> None:
        self._exchange = exchange
        # Documents give blocks of any size, and cuDNN would make a plan for each size.
        self._flash = documents is not None or backend == "flash"
        seq_length = q_BTNH.shape[1] * exchange.ring_size
        self._samples: Sequence[tuple[slice, Bounds]] = [(slice(None), (0, seq_length))]
        local_documents: Documents | None = None
        if documents is not None:
            bounds = bounds_of(documents.lengths, seq_length)
            self._samples = [(slice(n, n + 1), sample) for n, sample in enumerate(bounds)]
            local_documents = _local_documents(
                bounds, exchange.ring_rank, exchange.ring_size, q_BTNH.device
            )
        self._causal = CausalAttention(local_documents, self._flash)  # to this rank's keys

    def _blocks(self, source: int) -> Iterator[tuple[slice, slice, slice]]:
        """Yield the mask's full blocks with ring rank `source`: slices (samples, queries, keys)."""
        for samples, bounds in self._samples:
            block = mask_block(bounds, self._exchange.ring_rank, source, self._exchange.ring_size)
            if block is not None:
                yield samples, *block

    def attend(self, tensors: tuple[Tensor, Tensor]) -> PartialAttention:
        """Compute the output, in the type of queries, and the log-sum-exp."""
        q_BTNH, local_2BTKH = tensors
        merged: list[PartialAttention] = []

        def attend(source: int, kv_2BTKH: Tensor) -> None:
            if source == self._exchange.ring_rank:
                causal = self._causal.attend((q_BTNH, kv_2BTKH[0], kv_2BTKH[1]))
                merged.append(PartialAttention(causal.out_BSNH.float(), causal.lse_BSN))
                return
            for samples, queries, keys in self._blocks(source):
                k, v = kv_2BTKH[:, samples, keys]
                part = attend_block((q_BTNH[samples, queries], k, v), flash=self._flash)
                merged[0].of(samples, queries).merge_(part)

        self._exchange.exchange_kv(local_2BTKH, attend)
        return PartialAttention(merged[0].out_BSNH.to(q_BTNH.dtype), merged[0].lse_BSN)

    def grads(
        self, grad_BTNH: Tensor, tensors: tuple[Tensor, Tensor], whole: PartialAttention
    ) -> tuple[Tensor, Tensor]:
        """Compute the gradients of queries, and of this rank's keys and values."""
        q_BTNH, local_2BTKH = tensors
        grad_BTNH = grad_BTNH.contiguous()
        dq_BTNH: list[Tensor] = []  # allocated after the kernel's buffers are freed
        group = q_BTNH.shape[2] // local_2BTKH.shape[3]  # query heads per KV head

        def grads_of(source: int, kv_2BTKH: Tensor, first: int) -> AddGrads:
            shares = []
            heads = slice(group * first, group * (first + kv_2BTKH.shape[3]))

            def compute(samples: slice, queries: slice, keys: slice, *, causal: bool) -> None:
                at = samples, queries, heads
                k, v = kv_2BTKH[:, samples, keys]
                block = grad_BTNH[at], (q_BTNH[at], k, v), whole.of(*at)
                dq, *dkv = (
                    self._causal.grads(*block) if causal else block_grads(*block, flash=self._flash)
                )
                if not dq_BTNH:
                    dq_BTNH.append(torch.zeros_like(q_BTNH, dtype=torch.float32))
                dq_BTNH[0][at] += dq
                shares.append((samples, keys, dkv))

            if source == self._exchange.ring_rank:
                if heads.start < heads.stop:  # with one head the second part is empty
                    compute(slice(None), slice(None), slice(None), causal=True)
            else:
                for block in self._blocks(source):
                    compute(*block, causal=False)

            def add(total_2BTKH: Tensor) -> None:
                for samples, keys, dkv in shares:
                    for total, part in zip(total_2BTKH[:, samples, keys], dkv, strict=True):
                        total += part

            return add

        dkv_2BTKH = self._exchange.exchange_kv_and_grads(local_2BTKH, grads_of)
        return dq_BTNH[0].to(q_BTNH.dtype), dkv_2BTKH.to(local_2BTKH.dtype)


# [Note: causal mask of a ring]


@lru_cache(maxsize=4)  # all blocks of a micro-batch have equal arguments
def _local_documents(
    bounds: Sequence[Bounds], ring_rank: int, ring_size: int, device: torch.device
) -> Documents | None:
    lengths = [length for each in bounds for length in local_lengths(each, ring_rank, ring_size)]
    return documents_of(tuple(lengths), len(bounds), device)


@lru_cache(maxsize=8)
def bounds_of(lengths: tuple[int, ...], seq_length: int) -> tuple[Bounds, ...]:
    """Return the bounds of each sample, from the lengths of the documents of all samples."""
    samples, bounds = [], [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
        if bounds[-1] == seq_length:
            samples.append(tuple(bounds))
            bounds = [0]
    assert bounds == [0], f"documents of {lengths} tokens are no samples of {seq_length}"
    return tuple(samples)


def local_lengths(bounds: Bounds, ring_rank: int, ring_size: int) -> list[int]:
    """Return the lengths of the documents, or parts of them, in the two chunks of a ring rank."""
    chunks = ContextLayout(size=ring_size).ranges(ring_rank, bounds[-1])
    cuts = sorted({_count_before(bound, chunks) for bound in bounds})
    return [stop - start for start, stop in pairwise(cuts)]


def mask_block(
    bounds: Bounds, ring_rank: int, source: int, ring_size: int
) -> tuple[slice, slice] | None:
    """Return the queries of `ring_rank` and the keys of another ring rank that they attend to.

    All of these queries attend to all of these keys; slices are of the ranks' tokens.
    """
    layout = ContextLayout(size=ring_size)
    queries, keys = (layout.ranges(at, bounds[-1]) for at in (ring_rank, source))
    # In one document all queries attend to the first chunk of keys, or the second chunk to all.
    chunk = int(source > ring_rank)
    number = bisect_right(bounds, keys[chunk][-1])
    begin, end = bounds[number - 1], bounds[number]
    if end <= queries[chunk].start:
        return None
    query, key_stop = chunk * len(queries[0]), (chunk + 1) * len(keys[0])
    return slice(query, _count_before(end, queries)), slice(_count_before(begin, keys), key_stop)


def _count_before(position: int, chunks: tuple[range, ...]) -> int:
    """Count the tokens of a rank's chunks before a position of the sample."""
    return sum(min(max(position - chunk.start, 0), len(chunk)) for chunk in chunks)
