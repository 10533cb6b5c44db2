"""Bytes that attention sends where ranks share samples, exactly as in training, and allocates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from model.config import LlamaConfig
from model.units import recomputed_groups, unit_specs
from paro.collectives.schedule import Op
from paro.context_parallel.layout import num_pieces
from paro.distributed.byte_counter import Sent
from paro.planning.cost_model import Collective, UnitSize, first_trained, sent_by
from paro.planning.micro_batch import MicroBatch
from paro.topology import Topology, Use


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Bytes of what ranks send each other for a block's attention, in one pass over it."""

    there: int  # to each rank of an exchange: queries, keys and values
    back: int  # and the output
    pieces: int  # in which both go
    keys: int  # a place's keys and values, to the next place of a ring
    grads: int  # and their gradients

    @property
    def last(self) -> int:
        """The last piece of the output."""
        return self.back // self.pieces


def messages_of(config: LlamaConfig, batch: MicroBatch) -> Messages:
    """Those of a micro-batch whose samples ranks share."""
    layout, heads = batch.context, config.num_attention_heads
    kv_heads = max(config.num_query_groups, layout.heads)  # as they are sent
    numel = batch.num_tokens * config.kv_channels  # of a head
    return Messages(
        there=(heads + 2 * kv_heads) // layout.heads * numel * batch.compute_bytes,
        back=heads // layout.heads * numel * batch.compute_bytes,
        pieces=num_pieces(heads, kv_heads, layout) if layout.heads > 1 else 1,
        keys=2 * kv_heads * numel * batch.compute_bytes,
        grads=2 * kv_heads * numel * 4,
    )


@dataclass(frozen=True, slots=True)
class _Passes:
    """How often a block attends in a micro-batch."""

    forward: int
    backward: int
    partial: int = 0  # forwards of a recomputed core, which end before the last output is back
    kept: int = 0  # forwards that attend to nothing: their output is kept


def context_traffic(
    config: LlamaConfig,
    batch: MicroBatch,
    units: Sequence[UnitSize],
    topology: Topology,
    rank: int = 0,
) -> Sent:
    """Bytes that a rank sends in a micro-batch for attention; `topology` has the run's groups."""
    layout = batch.context
    own = layout.topology(world_size=topology.world_size, group_size=topology.group_size)
    messages, total = messages_of(config, batch), Sent()
    for passes in _passes(config, units):
        if layout.heads > 1:
            total += _exchanged(messages, batch, own, rank, passes)
        if layout.ring > 1:
            total += _travelled(messages, batch, own, rank, passes)
    return total


def _passes(config: LlamaConfig, units: Sequence[UnitSize]) -> Iterator[_Passes]:
    """Those of every block."""
    first = first_trained(units)
    groups = recomputed_groups(unit_specs(config), first)
    again = {index for group in groups for index in group}
    core = config.recompute is not None and config.recompute.core_attention
    for index in range(1, len(units) - 1):
        if index < first:
            yield _Passes(1, 0)
        elif index in again:
            yield _Passes(2, 1, kept=config.keeps_core)
        else:
            yield _Passes(1, 1, partial=core)


def _exchanged(
    messages: Messages, batch: MicroBatch, own: Topology, rank: int, passes: _Passes
) -> Sent:
    """Queries, keys and values go to each of the other ranks, and outputs come back."""
    to_each = (passes.forward + passes.backward) * (messages.there + messages.back)
    to_each += passes.partial * (messages.there + messages.back - messages.last)
    peers = [other for other in own.members(batch.context.heads_span(own), rank) if other != rank]
    inside = sum(_same_group(own, rank, other) for other in peers)
    return Sent(inside * to_each, (len(peers) - inside) * to_each)


def _travelled(
    messages: Messages, batch: MicroBatch, own: Topology, rank: int, passes: _Passes
) -> Sent:
    """Keys and values of every place travel in each pass, their fp32 gradients in backward."""
    layout = batch.context
    num_passes = passes.forward + passes.backward + passes.partial - passes.kept
    of_place = num_passes * messages.keys + passes.backward * messages.grads
    if layout.gathers:
        span, whole = layout.ring_span(own), layout.ring * of_place
        return sent_by((Collective(Use.CONTEXT, Op.ALL_GATHER, span, whole, batch.compute_bytes),))
    inner, outer = (own.members(span, rank) for span in layout.rings(own))
    hops = (inner, len(outer) * (len(inner) - 1)), (outer, len(outer) - 1)
    total = Sent()
    for members, number in hops:
        after = members[(members.index(rank) + 1) % len(members)]
        sent = number * of_place
        total += Sent(sent, 0) if _same_group(own, rank, after) else Sent(0, sent)
    return total


def travelling_bytes(config: LlamaConfig, batch: MicroBatch) -> int:
    """Allocated at most in attention's backward where keys and values travel.

    The gradient of its output; those of queries, summed in fp32 and of one part; those of a part's
    keys and values; and keys and values that move, with their gradients' sums in fp32.
    """
    layout, size = batch.context, batch.compute_bytes
    queries = batch.num_tokens * config.num_attention_heads * config.kv_channels
    kv_heads = max(config.num_query_groups, layout.heads)
    of_place = 2 * batch.num_tokens * kv_heads * config.kv_channels
    part = queries * (2 * size + 4) + of_place * size
    if layout.gathers:
        return part + layout.ring * of_place * (size + 4)
    inner = layout.inner or layout.size
    places, turns = inner // layout.heads, layout.size // inner
    moving = (min(2, places - 1) + min(2, turns - 1)) * size
    sums = 1 + 2 * (places > 1) + 2 * (turns > 2)  # the first is at home
    waiting = size if turns > 1 else 0  # a turn's first share
    return part + of_place * (moving + 4 * sums + waiting)


def _same_group(topology: Topology, rank: int, other: int) -> bool:
    return rank // topology.group_size == other // topology.group_size
