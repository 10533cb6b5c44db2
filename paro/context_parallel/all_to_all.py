"""All-to-alls of tokens for heads among ranks that share a sample, and back, under computation."""

# Outside attention each of U ranks has T tokens and U h heads; inside, U T tokens and h heads.
# Letters as in model/llama.py: B samples, H channels of a head. A message has a part per rank:
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
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paro.collectives.interface import Endpoint
from paro.collectives.wire import Wire
from paro.distributed.comm_stream import Event
from paro.distributed.exposed_time import WaitKind
from paro.topology import AxisSpan, StreamKind


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
        with self.exposure.submitting(WaitKind.CONTEXT):
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
        self._all_to_all.exposure.wait(WaitKind.CONTEXT, event)
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
