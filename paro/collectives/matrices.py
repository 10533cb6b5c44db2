"""Moves parts of matrices between the ranks that hold an optimizer shard together."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from paro.collectives.wire import Wire
from paro.distributed.comm_stream import DONE, Event
from paro.distributed.groups import Groups, make_groups
from paro.distributed.links import Links
from paro.topology import AxisSpan, Topology, Use


class MatrixExchange:
    """All-to-alls of parts of any size between the places of a span (Note: places and rounds)."""

    def __init__(self, groups: Groups, links: Links, span: AxisSpan) -> None:
        self._groups = groups
        self._streams = links.streams
        self._wire = Wire(groups, links.traffic)
        self._span = span
        self._ranks = groups.topology.in_order_of_shards(span, groups.rank)
        self.place = self._ranks.index(groups.rank)
        self.num_places = len(self._ranks)

    def trade(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> Event:
        """Queues an all-to-all of parts by place; both ends know how many elements each part has.

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

        return self._streams.submit((Use.EXCHANGE, *self._span), job)

    def close(self) -> None:
        """Closes the process groups; the comm stream is closed with the others."""
        self._groups.close()


def make_matrix_exchange(
    span: AxisSpan, topology: Topology, rank: int, links: Links
) -> MatrixExchange:
    """The exchange along the span of an optimizer shard, with a process group if it has ranks.

    Collective over the world.
    """
    spans = {Use.EXCHANGE: frozenset({span} if span else ())}
    groups = make_groups(topology, rank, spans, links.group_config)
    return MatrixExchange(groups, links, span)
