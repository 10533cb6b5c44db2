"""Collectives by name: one algorithm, or a choice of several by message size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from paro.collectives.choice import AlgorithmChoice
from paro.collectives.hops import ALGORITHMS
from paro.collectives.interface import CollectiveRequest, Collectives
from paro.collectives.native import FlatCollectives, NativeCollectives
from paro.collectives.pipelined import PipelinedCollectives
from paro.collectives.scheduled import GroupResources, Resources, ScheduledCollectives
from paro.distributed.comm_stream import Event
from paro.distributed.groups import Groups


def make_collectives(choice: AlgorithmChoice, groups: Groups) -> Collectives:
    """Return collectives by a choice of algorithms, for which `groups` has been made."""
    resources: Resources = defaultdict(GroupResources)

    def make(name: str) -> Collectives:
        if name == "ho-ring" and choice.num_chunks is not None:
            return PipelinedCollectives(groups, choice.num_chunks)
        if name in ALGORITHMS:
            return ScheduledCollectives(groups, resources, name)
        return (FlatCollectives if name == "flat" else NativeCollectives)(groups)

    made = {name: make(name) for name in choice.names}
    if choice.best is None:
        return made[choice.names[0]]
    return AutoCollectives(groups, made, choice)


@dataclass(eq=False)
class AutoCollectives(Collectives):
    """Collectives that choose an algorithm per call; all share comm streams and process groups.

    `run_after` may use any comm stream: its job waits for the reduction of any algorithm.
    """

    algorithms: Mapping[str, Collectives]
    choice: AlgorithmChoice

    def run(self, request: CollectiveRequest) -> Event:
        name = self.choice.of(request.op, request.span, request.num_bytes)
        return self.algorithms[name].run(request)
