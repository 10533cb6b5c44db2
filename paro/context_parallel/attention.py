"""Attention of samples that several ranks share: by all-to-alls of heads, by ring attention."""

# B samples, H channels of a head; the ranks' letters are those of paro/spec/context_layout.py.
# Heads are exchanged in chunks: attention to one chunk is computed while the next chunk is sent.
# Outside attention each of U ranks has T tokens and U h heads; inside, U T tokens and h heads. A
# message has a part per rank:
#
#     tokens for heads    [B, T, U h, H] -> [U, B, T, h, H] -> sent -> [B, U T, h, H]
#     heads for tokens    [B, U T, h, H] -> [U, B, T, h, H] -> sent -> [B, T, U h, H]
#
# Each is the backward of the other. An all-to-all is two nodes of autograd's graph, with other
# computation in between:
#
#     forward     _Start: send the message            ...    _Finish: wait for the message
#     backward    _Finish: send the gradients         ...    _Start: wait for the gradients

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from model.attention import QKV, Core, Documents, SavedAttention, documents_of
from model.block_attention import TILE, attend_saving
from model.config import AttentionBackend
from paro.collectives.api import make_collectives
from paro.collectives.choice import AlgorithmChoice
from paro.collectives.interface import Endpoint
from paro.collectives.wire import Wire
from paro.context_parallel.blockwise import blockwise_attention
from paro.context_parallel.exchange import GatherKVExchange, RingKVExchange
from paro.distributed.comm_stream import Event
from paro.distributed.groups import Groups
from paro.errors import RunError
from paro.spec.context_layout import ContextLayout, head_exchange
from paro.spec.kv_exchange import GatheredKV
from paro.topology import AxisSpan, StreamKind, WaitKind

_CHUNK = 16  # tokens per chunk of a sample on a CPU
# Largest error / largest value: in fp32; in types of 8 mantissa bits or more.
_WITHIN_FP32, _WITHIN_16_BITS = 1e-4, 2.0**-4


@dataclass(eq=False)
class AllToAll(Endpoint):
    """All-to-alls among the ranks along `span`, on a comm stream of their own.

    All ranks must start equal all-to-alls in the same order.
    """

    span: AxisSpan

    def __post_init__(self) -> None:
        self._context_wire = Wire(self.groups, StreamKind.CONTEXT, self.span)
        self.num_ranks = len(self._context_wire.members)

    def start(self, sent: Tensor, received: Tensor) -> Event:
        """Send row r to rank r of the span, and receive rows in rank order."""
        with self.exposed_timer.submitting(WaitKind.CONTEXT):
            job = partial(self._context_wire.all_to_all, sent, received)
            return self._submit(StreamKind.CONTEXT, self.span, job)


class AutogradAllToAll:
    """An all-to-all (tokens `for_heads`, or the reverse) whose backward is the reverse one."""

    def __init__(self, all_to_all: AllToAll, *, for_heads: bool) -> None:
        self._all_to_all = all_to_all
        self._for_heads = for_heads
        self._underway: tuple[Tensor, Tensor, Event] | None = None  # sent, received, completion
        self._widths: list[int] = []  # number of heads of each tensor in a message

    def start(self, *tensors: Tensor) -> Tensor:
        """Start to exchange tensors in one message; return the token that `finish` takes."""
        return _Start.apply(self, *tensors)

    def finish(self, token: Tensor) -> tuple[Tensor, ...]:
        """Return the exchanged tensors."""
        return _Finish.apply(self, token)

    def send(self, tensors: Sequence[Tensor], *, back: bool = False) -> None:
        by_rank = self._all_to_all.num_ranks, -1
        if self._for_heads is not back:
            split = [tensor.unflatten(2, by_rank).permute(2, 0, 1, 3, 4) for tensor in tensors]
        else:
            split = [tensor.unflatten(1, by_rank).transpose(0, 1) for tensor in tensors]
        self._widths = [part.shape[3] for part in split]
        sent = torch.cat(split, dim=3)
        received = torch.empty_like(sent)
        self._underway = sent, received, self._all_to_all.start(sent, received)

    def receive(self, *, back: bool = False) -> tuple[Tensor, ...]:
        assert self._underway is not None, "nothing is under way"
        _, received, event = self._underway
        self._all_to_all.exposed_timer.wait(WaitKind.CONTEXT, event)
        self._underway = None
        parts = received.split(self._widths, dim=3)
        if self._for_heads is not back:
            return tuple(part.transpose(0, 1).flatten(1, 2) for part in parts)
        return tuple(part.permute(1, 2, 0, 3, 4).flatten(2, 3) for part in parts)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: AutogradAllToAll, *tensors: Tensor) -> Tensor:
        ctx.exchange = exchange
        exchange.send(tensors)
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_token: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.exchange.receive(back=True))


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: AutogradAllToAll, token: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return exchange.receive()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        ctx.exchange.send(grads, back=True)
        return None, grads[0].new_zeros(())


class ContextAttention:
    """The model's attention where ranks exchange heads; every rank calls it with its tokens.

    in     queries [B, T, N, H], keys and values [B, T, K, H] of this rank's positions
           (`layout.ranges`); lengths of the documents of entire samples
    out    [B, T, N, H]; `within` computes it between the exchanges of heads: with all tokens of a
           sample on this rank, or along a ring of ranks
    """

    def __init__(self, layout: ContextLayout, all_to_all: AllToAll, within: Core) -> None:
        self._layout = layout
        self._all_to_all = all_to_all
        self._within = within
        self._abandoned: list[AutogradAllToAll] = []

    def __call__(
        self, qkv: QKV, documents: Documents | None, saved: SavedAttention | None
    ) -> Tensor:
        q_BTNH, k_BTKH, v_BTKH = qkv
        for exchange in self._abandoned:
            exchange.receive()
        num_ranks = self._all_to_all.num_ranks
        num_chunks, kv_chunks, repeats = head_exchange(
            q_BTNH.shape[2], k_BTKH.shape[2], self._layout
        )
        if repeats > 1:
            k_BTKH, v_BTKH = (part.repeat_interleave(repeats, 2) for part in (k_BTKH, v_BTKH))
        queries = _by_chunk(q_BTNH, num_ranks, num_chunks)
        keys, values = (_by_chunk(part, num_ranks, kv_chunks) for part in (k_BTKH, v_BTKH))
        outgoing = []
        for number, query in enumerate(queries):
            exchange = AutogradAllToAll(self._all_to_all, for_heads=True)
            tensors = (query, *(part[number] for part in (keys, values) if number < len(part)))
            outgoing.append((exchange, exchange.start(*tensors)))
        incoming: list[tuple[AutogradAllToAll, Tensor]] = []
        # A recomputation is stopped at the last tensor that backward needs, in `within`. Messages
        # still under way then must arrive before their memory is reused.
        self._abandoned = []
        kv: list[Tensor] = []
        for exchange, token in outgoing:
            query, *new = exchange.finish(token)
            kv = new or kv  # the first queries come with some
            key, value = kv
            back = AutogradAllToAll(self._all_to_all, for_heads=False)
            out = self._within((query, key, value), documents, saved)
            incoming.append((back, back.start(out)))
            self._abandoned.append(back)
        self._abandoned = []
        outs = [back.finish(token)[0].unflatten(2, (num_ranks, -1)) for back, token in incoming]
        return torch.cat(outs, dim=3).flatten(2, 3)


def _by_chunk(x_BTNH: Tensor, num_ranks: int, num_chunks: int) -> list[Tensor]:
    """Split heads into chunks, each with some neighbouring heads of every rank."""
    parts = x_BTNH.unflatten(2, (num_ranks, num_chunks, -1)).unbind(3)
    return [part.flatten(2, 3) for part in parts]


def make_context_attention(
    layout: ContextLayout, groups: Groups, choice: AlgorithmChoice, backend: AttentionBackend
) -> Core:
    """Return the attention of a `layout`, with a KV exchange unless only heads are exchanged."""
    within: Core = partial(attend_saving, backend)
    exchange = layout.kv_exchange(groups.topology)
    if isinstance(exchange, GatheredKV):
        # Streams apart: attention never waits behind the collectives of model states.
        apart = replace(groups, resources=replace(groups.resources, stream_kind=StreamKind.CONTEXT))
        gather = GatherKVExchange(exchange, make_collectives(choice, apart))
        within = blockwise_attention(gather, backend)
    elif exchange.ranks > 1:
        within = blockwise_attention(RingKVExchange(exchange, groups), backend)
    span = layout.heads_span(groups.topology)
    return ContextAttention(layout, AllToAll(groups, span), within) if span else within


# Attention that sends nothing, or to the wrong rank, would not stop training: every rank attends to
# its own tokens, at a speed that looks good.


def check_core(
    core: Core,
    layout: ContextLayout,
    rank: int,
    example: Tensor,
    backend: AttentionBackend,
    *,
    apart: bool,
) -> None:
    """Raise `RunError` if `core` and local attention differ in outputs or gradients; collective.

    The sample has 2C x 16 tokens (on a GPU 2C x 128) and one head for every rank that exchanges
    heads. Every rank computes local attention to the entire sample. `example` has the dtype, device
    and channels of queries; with `apart` the sample has two documents.
    """
    length = 2 * layout.size * (TILE if example.is_cuda else _CHUNK)
    lengths = (length // 3, length - length // 3) if apart else None
    documents = documents_of(lengths, 1, example.device)
    generator = torch.Generator().manual_seed(0)
    shape = 1, length, layout.heads, example.shape[-1]
    q, k, v, grad = (torch.randn(shape, generator=generator).to(example) for _ in range(4))

    def local(x_BSNH: Tensor) -> Tensor:
        ranges = layout.ranges(rank, length)
        return torch.cat([x_BSNH[:, part.start : part.stop] for part in ranges], 1)

    whole = partial(attend_saving, backend)
    expected = [local(tensor) for tensor in _run(whole, (q, k, v), grad, documents)]
    actual = _run(core, (local(q), local(k), local(v)), local(grad), documents)
    within = _WITHIN_FP32 if example.dtype is torch.float32 else _WITHIN_16_BITS
    for name, one, other in zip(("output", "dq", "dk", "dv"), actual, expected, strict=True):
        error = float((one - other).abs().max() / other.abs().max())
        if not error <= within:  # NaN too
            raise RunError(
                f"rank {rank}: attention over {layout.size} ranks that share a sample is not that "
                f"of one rank: {name} differs by {error:.1e} of its largest value: links or "
                "kernels are at fault; try another --cp-comm-type"
            )


def _run(core: Core, parts: QKV, grad: Tensor, documents: Documents | None) -> list[Tensor]:
    """Return the output, and the gradients of queries, keys and values."""
    leaves = [part.clone().requires_grad_() for part in parts]
    with torch.enable_grad():
        out = core((leaves[0], leaves[1], leaves[2]), documents, None)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]
