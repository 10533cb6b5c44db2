"""Bytes that attention sends where ranks share samples, exactly as in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from model.config import LlamaConfig
from model.units import recomputed_groups, unit_specs
from paro.context_parallel.layout import num_pieces
from paro.distributed.byte_counter import Sent
from paro.planning.cost_model import UnitSize, first_trained
from paro.planning.micro_batch import MicroBatch
from paro.topology import Topology


@dataclass(frozen=True, slots=True)
class _Exchanged:
    """Bytes of a block that go to each of the other ranks with which heads are exchanged."""

    there: int  # queries, keys and values
    back: int  # attention's output
    pieces: int

    def total(self, *, recomputed: bool, core_recomputed: bool) -> int:
        """Of a forward and a backward; a recomputed core ends before the last piece of output."""
        both = 2 * (self.there + self.back)
        if recomputed:
            return both + self.there + self.back
        again = self.there + self.back * (self.pieces - 1) // self.pieces
        return both + again if core_recomputed else both


def context_traffic(
    config: LlamaConfig,
    batch: MicroBatch,
    units: Sequence[UnitSize],
    topology: Topology,
    rank: int = 0,
) -> Sent:
    """Bytes that a rank sends in a micro-batch for attention; `topology` has the run's groups."""
    layout = batch.context
    if layout.heads == 1:
        return Sent()
    exchanged = _exchanged(config, batch)
    first = first_trained(units)
    groups = recomputed_groups(unit_specs(config), first)
    again = {index for group in groups for index in group}
    core = config.recompute is not None and config.recompute.core_attention
    to_each = sum(
        exchanged.total(recomputed=index in again, core_recomputed=core)
        if index >= first
        else exchanged.there + exchanged.back
        for index in range(1, len(units) - 1)
    )
    own = layout.topology(world_size=topology.world_size, group_size=topology.group_size)
    group = rank // topology.group_size
    peers = [other for other in own.members(layout.heads_span(own), rank) if other != rank]
    inside = sum(other // topology.group_size == group for other in peers)
    return Sent(inside * to_each, (len(peers) - inside) * to_each)


def _exchanged(config: LlamaConfig, batch: MicroBatch) -> _Exchanged:
    ranks, heads = batch.context.heads, config.num_attention_heads
    kv_heads = max(config.num_query_groups, ranks)  # as they are sent
    head_bytes = batch.num_tokens * config.kv_channels * batch.compute_bytes
    return _Exchanged(
        there=(heads + 2 * kv_heads) // ranks * head_bytes,
        back=heads // ranks * head_bytes,
        pieces=num_pieces(heads, kv_heads, ranks),
    )
