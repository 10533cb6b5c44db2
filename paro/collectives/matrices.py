"""Exchanges shards of matrices among the ranks of a shard group, for Muon."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from paro.collectives.interface import Endpoint
from paro.distributed.comm_stream import DONE, Event
from paro.topology import AxisSpan, StreamKind


@dataclass(eq=False)
class MatrixExchange(Endpoint):
    """All-to-alls of shards of any size along the span of a shard group (Note: Muon's rounds).

    Ranks are numbered inside the group, in the order of their optimizer shards.
    """

    span: AxisSpan

    def __post_init__(self) -> None:
        self._ranks = self.groups.topology.in_order_of_shards(self.span, self._rank)
        self.group_rank = self._ranks.index(self._rank)

    def all_to_all(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> Event:
        """Queue an all-to-all of shards by group rank; both ends know the size of each shard.

        The caller must not free or change the tensors before the event is done.
        """
        own = self.group_rank
        if own in received:
            received[own].copy_(sent[own])
        if not self.span:
            return DONE

        def job() -> None:
            out, into = (
                {self._ranks[rank]: shard for rank, shard in shards.items() if rank != own}
                for shards in (sent, received)
            )
            self._wire(StreamKind.EXCHANGE, self.span).exchange(out, into)

        return self._submit(StreamKind.EXCHANGE, self.span, job)
