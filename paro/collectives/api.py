"""Constructs collectives by name: one algorithm, or a choice of several by message size."""

from __future__ import annotations

from paro.collectives.auto import AutoCollectives
from paro.collectives.choice import AlgorithmChoice
from paro.collectives.executor import ALGORITHMS, Ends, ScheduledCollectives
from paro.collectives.flat import FlatCollectives
from paro.collectives.interface import Collectives
from paro.collectives.native import NativeCollectives
from paro.collectives.pipelined import PipelinedCollectives
from paro.collectives.spans import needed_groups
from paro.distributed.byte_counter import ByteCounter
from paro.distributed.comm_stream import CommStreams
from paro.distributed.groups import GroupConfig, make_groups
from paro.topology import AxisSpan, Topology, Use


def make_collectives(
    algorithm: str | AlgorithmChoice,
    *,
    topology: Topology,
    rank: int,
    spans: dict[Use, frozenset[AxisSpan]],
    streams: CommStreams,
    traffic: ByteCounter,
    group_config: GroupConfig | None,
) -> Collectives:
    """Collectives along `spans`; every rank must call it with the same arguments."""
    choice = (
        algorithm if isinstance(algorithm, AlgorithmChoice) else AlgorithmChoice(names=(algorithm,))
    )
    needed = needed_groups(choice.names, spans, pipelined=choice.pieces is not None)
    groups = make_groups(topology, rank, needed, group_config)
    ends = Ends()

    def make(name: str) -> Collectives:
        if name == "ho-ring" and choice.pieces is not None:
            return PipelinedCollectives(groups, streams, traffic, choice.pieces)
        if name in ALGORITHMS:
            return ScheduledCollectives(name, groups, streams, traffic, ends)
        return _BACKENDS[name](groups, streams, traffic)

    made = {name: make(name) for name in choice.names}
    if choice.best is None:
        return made[choice.names[0]]
    return AutoCollectives(made, choice.best, groups, streams)


_BACKENDS: dict[str, type[NativeCollectives | FlatCollectives]] = {
    "native": NativeCollectives,
    "flat": FlatCollectives,
}
