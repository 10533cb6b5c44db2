"""Attention of samples that several ranks share: by all-to-alls of heads, by ring attention."""

# Letters as in model/llama.py and, for the ranks, in layout.py. Heads are exchanged in chunks:
# attention to one chunk is computed while the next chunk is sent.

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from model.attention import Core, Documents
from model.block_attention import attend_saving
from model.config import AttentionBackend
from model.recompute import SavedAttention
from paro.collectives.choice import AlgorithmChoice
from paro.context_parallel.all_to_all import AllToAll, AutogradAllToAll
from paro.context_parallel.blockwise import blockwise_attention
from paro.context_parallel.gather import make_gather
from paro.context_parallel.ring import make_rings
from paro.distributed.groups import Groups
from paro.spec.context_layout import ContextLayout, num_head_chunks


class ContextAttention:
    """The model's attention where ranks share samples; every rank calls it with its tokens.

    in     queries [B, T, N, H], keys and values [B, T, K, H] of this rank's positions
           (`layout.ranges`); lengths of the documents of entire samples
    out    [B, T, N, H]; `within` computes it between the exchanges of heads: with all tokens of a
           sample on this rank, or along a ring of ranks
    """

    def __init__(self, layout: ContextLayout, all_to_all: AllToAll | None, within: Core) -> None:
        self._layout = layout
        self._all_to_all = all_to_all
        self._within = within
        self._abandoned: list[AutogradAllToAll] = []

    def __call__(
        self,
        q_BTNH: Tensor,
        k_BTKH: Tensor,
        v_BTKH: Tensor,
        documents: Documents | None,
        saved: SavedAttention | None,
    ) -> Tensor:
        if self._all_to_all is None:
            return self._within(q_BTNH, k_BTKH, v_BTKH, documents, saved)
        for exchange in self._abandoned:
            exchange.receive()
        num_ranks = self._all_to_all.num_ranks
        repeats = max(1, num_ranks // k_BTKH.shape[2])
        if repeats > 1:  # a rank's queries need one head of keys
            k_BTKH, v_BTKH = (part.repeat_interleave(repeats, 2) for part in (k_BTKH, v_BTKH))
        num_chunks = num_head_chunks(q_BTNH.shape[2], k_BTKH.shape[2], self._layout)
        queries = _by_chunk(q_BTNH, num_ranks, num_chunks)
        # A single head of keys and values per rank is sent with the first chunk of queries.
        apart = k_BTKH.shape[2] > num_ranks
        keys, values = (
            _by_chunk(x, num_ranks, num_chunks if apart else 1) for x in (k_BTKH, v_BTKH)
        )
        outgoing = []
        for number, query in enumerate(queries):
            exchange = AutogradAllToAll(self._all_to_all, for_heads=True)
            tensors = (query, *(part[number] for part in (keys, values) if number < len(part)))
            outgoing.append((exchange, exchange.start(*tensors)))
        incoming: list[tuple[AutogradAllToAll, Tensor]] = []
        # A recomputation is stopped at the last tensor that backward needs, in `within`. Messages
        # still under way then must arrive before their memory is reused.
        self._abandoned = []
        key = value = None
        for exchange, token in outgoing:
            query, *new = exchange.finish(token)
            key, value = new or (key, value)
            assert key is not None, "they come with the first queries"
            assert value is not None, "and so do values"
            back = AutogradAllToAll(self._all_to_all, for_heads=False)
            out = self._within(query, key, value, documents, saved)
            incoming.append((back, back.start(out)))
            self._abandoned.append(back)
        self._abandoned = []
        outs = [
            exchange.finish(token)[0].unflatten(2, (num_ranks, -1)) for exchange, token in incoming
        ]
        return torch.cat(outs, dim=3).flatten(2, 3)


def _by_chunk(x_BTNH: Tensor, num_ranks: int, num_chunks: int) -> list[Tensor]:
    """Split heads into chunks, each with some neighbouring heads of every rank."""
    parts = x_BTNH.unflatten(2, (num_ranks, num_chunks, -1)).unbind(3)
    return [part.flatten(2, 3) for part in parts]


def make_context_attention(
    layout: ContextLayout,
    groups: Groups,
    choice: AlgorithmChoice,
    backend: AttentionBackend,
) -> ContextAttention:
    """Return the attention of a `layout`, with a KV exchange unless only heads are exchanged."""
    within: Core = partial(attend_saving, backend)
    if layout.gathers:
        within = blockwise_attention(make_gather(layout, groups, choice), backend)
    elif layout.ring > 1:
        within = blockwise_attention(make_rings(layout, groups), backend)
    span = layout.heads_span(groups.topology)
    return ContextAttention(layout, AllToAll(groups, span) if span else None, within)
