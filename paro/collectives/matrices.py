"""Exchanges shards of matrices among the ranks of a shard group, for Muon."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from paro.collectives.interface import Endpoint
from paro.distributed.comm_stream import DONE, Event
from paro.distributed.groups import Groups
from paro.distributed.links import Links
from paro.topology import AxisSpan, StreamKind


class MatrixExchange(Endpoint):
    """All-to-alls of shards of any size along the span of a shard group (Note: Muon's rounds).

    Ranks are numbered inside the group, in the order of their optimizer shards.
    """

    def __init__(self, span: AxisSpan, groups: Groups, links: Links) -> None:
        super().__init__(groups, links)
        self._span = span
        self._ranks = groups.topology.in_order_of_shards(span, groups.rank)
        self.group_rank = self._ranks.index(groups.rank)

    def all_to_all(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> Event:
        """Queue an all-to-all of shards by group rank; both ends know the size of each shard.

        The caller must not free or change the tensors before the event is done.
        """
        own = self.group_rank
        if own in received:
            received[own].copy_(sent[own])
        if not self._span:
            return DONE

        def job() -> None:
            out, into = (
                {self._ranks[rank]: shard for rank, shard in shards.items() if rank != own}
                for shards in (sent, received)
            )
            self._wire.exchange(StreamKind.EXCHANGE, self._span, out, into)

        return self._submit(StreamKind.EXCHANGE, self._span, job)
