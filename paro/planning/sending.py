"""Counts the bytes that a rank sends for a collective, a message or a step."""

# An algorithm splits an axis span into parts. In a part of n ranks every rank sends (n - 1) / n of
# the part's buffer (an all-reduce twice as much). If a part has links inside groups and between
# groups, the receiver decides which links carry the bytes:
#
#     native, h-ring, ho-ring    no part has both kinds of links
#     ring                       one part: gathers go to the next rank, reductions to the previous
#     flat                       one part: to the next rank; but gloo's reduce-scatter sends to
#                                each rank the shard that this rank sums
#
# In a part with both kinds, only the last rank of a group sends to the next group, and only the
# first rank to the previous group: ranks differ, so the mean over all ranks counts, or one rank.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from paro.collectives.choice import AlgorithmChoice, group_spans
from paro.collectives.schedule import Op
from paro.precision import BYTES_OF
from paro.spec.muon_rounds import muon_rounds
from paro.spec.sharding_spec import Collective, ShardingSpec
from paro.step.actions import PASS_OF, Action
from paro.topology import AxisSpan, Link, Sent


class Receivers(Enum):
    """The members of an axis span to which a rank sends a message."""

    EACH = "each of the other ranks"
    NEXT = "the next rank of a ring"
    PREVIOUS = "the previous rank of a ring"


_ON_RINGS = {
    Op.ALL_GATHER: (Receivers.NEXT,),
    Op.REDUCE_SCATTER: (Receivers.PREVIOUS,),
    Op.ALL_REDUCE: (Receivers.PREVIOUS, Receivers.NEXT),
}
_BY_BACKEND = {
    Op.ALL_GATHER: (Receivers.NEXT,),
    Op.REDUCE_SCATTER: (Receivers.NEXT,),
    Op.ALL_REDUCE: (Receivers.NEXT, Receivers.NEXT),
}
_BY_GLOO = _BY_BACKEND | {Op.REDUCE_SCATTER: (Receivers.EACH,)}
NATIVE = AlgorithmChoice(names=("native",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """A rank that sends, in groups of `group_size`; with rank None the mean of all ranks."""

    group_size: int
    rank: int | None
    choice: AlgorithmChoice = NATIVE

    def sent(self, collectives: Iterable[Collective]) -> Sent:
        """Count the bytes that the rank sends for collectives."""
        return sum((each for sent in collectives for each in self._messages(sent)), Sent())

    def _messages(self, sent: Collective) -> Iterator[Sent]:
        choice = NATIVE if sent.is_exchange else self.choice
        name = choice.of(sent.op, sent.span, sent.num_bytes)
        ways = _BY_BACKEND if choice.num_chunks else _BY_GLOO
        whole = sent.num_bytes * sent.span[0].inner
        for part in group_spans(name, sent.span, pipelined=choice.num_chunks is not None):
            inner, outer = part[0].inner, part[-1].outer
            assert whole % outer == 0, f"{sent} is not padded for {part}"
            shard = whole // outer
            for to in (_ON_RINGS if name == "ring" else ways)[sent.op]:
                size = shard if to is Receivers.EACH else whole // inner - shard
                yield self.message(to, part, size)

    def message(self, to: Receivers, span: AxisSpan, num_bytes: int) -> Sent:
        """Count the bytes that the rank sends for a message of `num_bytes` along a span."""
        inner, size = span[0].inner, span[-1].outer // span[0].inner
        inside = min(size, max(1, self.group_size // inner))  # ranks of the span in one group
        if to is Receivers.EACH:
            return Sent((inside - 1) * num_bytes, (size - inside) * num_bytes)
        if inside == size:
            return Sent(intra=num_bytes)
        if self.rank is None:
            between = num_bytes // inside
        else:
            position = self.rank % self.group_size // inner
            between = num_bytes if position == (inside - 1 if to is Receivers.NEXT else 0) else 0
        return Sent(num_bytes - between, between)


def traffic_of(
    actions: Mapping[Action, int], specs: Sequence[ShardingSpec], sender: Sender
) -> Sent:
    """Count the bytes that a rank sends for the actions of a step, given the count of each action.

    A step all-gathers the parameters that the previous step updated, so a run's first step sends
    less than counted.
    """
    total = muon_sent(specs, sender.rank)
    for (kind, number, *_), count in actions.items():
        spec = specs[number]
        # A pass of d - 1 shifts sends as much as a gather, or as a reduction.
        shifts = spec.strategy.params - 1 if kind in PASS_OF else 1
        whole = sender.sent(spec.sent_by(kind))
        total += Sent(whole.intra // shifts, whole.inter // shifts) * count
    return total


def muon_sent(specs: Sequence[ShardingSpec], rank: int | None = None) -> Sent:
    """Count the bytes that a rank sends in a step for Muon's all-to-alls; None: the mean."""
    total, topology = Sent(), specs[0].topology
    of_element = BYTES_OF[specs[0].precision.matrix_wire]
    for rounds in muon_rounds(specs):
        sent = dict.fromkeys(Link, 0)
        ranks = topology.in_order_of_shards(rounds.span(topology), rank or 0)
        for (sender, receiver), numel in rounds.sent_numels.items():
            inside = ranks[sender] // topology.group_size == ranks[receiver] // topology.group_size
            if rank in (None, ranks[sender]):
                sent[Link.INTRA if inside else Link.INTER] += numel * of_element
        share = rounds.num_ranks if rank is None else 1
        total += Sent(sent[Link.INTRA] // share, sent[Link.INTER] // share)
    return total
