"""Moves parts of matrices between the ranks that hold an optimizer shard together."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from paro.collectives.interface import Endpoint
from paro.distributed.comm_stream import DONE, Event
from paro.distributed.groups import Groups
from paro.distributed.links import Links
from paro.topology import AxisSpan, Use


class MatrixExchange(Endpoint):
    """All-to-alls of parts of any size between the places of a span (Note: places and rounds).

    The span is that of an optimizer shard.
    """

    def __init__(self, span: AxisSpan, groups: Groups, links: Links) -> None:
        super().__init__(groups, links)
        self._span = span
        self._ranks = groups.topology.in_order_of_shards(span, groups.rank)
        self.place = self._ranks.index(groups.rank)
        self.num_places = len(self._ranks)

    def trade(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> Event:
        """Queue an all-to-all of parts by place; both ends know how many elements each part has.

        The tensors must stay until the event is done.
        """

        if self.place in received:
            received[self.place].copy_(sent[self.place])
        if not self._span:
            return DONE

        def job() -> None:
            out, into = (
                {self._ranks[place]: part for place, part in parts.items() if place != self.place}
                for parts in (sent, received)
            )
            self._wire.trade(Use.EXCHANGE, self._span, out, into)

        return self._submit(Use.EXCHANGE, self._span, job)
