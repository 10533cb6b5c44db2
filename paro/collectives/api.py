"""Collectives by name: one algorithm, or a choice of several by message size."""

from __future__ import annotations

from collections.abc import Mapping

from paro.collectives.choice import AlgorithmChoice
from paro.collectives.hops import ALGORITHMS
from paro.collectives.interface import Collectives, Request
from paro.collectives.native import FlatCollectives, NativeCollectives
from paro.collectives.pipelined import PipelinedCollectives
from paro.collectives.scheduled import GroupResources, ScheduledCollectives
from paro.distributed.comm_stream import Event
from paro.distributed.groups import Groups
from paro.distributed.links import Links


def make_collectives(choice: AlgorithmChoice, groups: Groups, links: Links) -> Collectives:
    """Return collectives by a choice of algorithms, for which `groups` has been made."""
    resources = GroupResources()

    def make(name: str) -> Collectives:
        if name == "ho-ring" and choice.num_chunks is not None:
            return PipelinedCollectives(groups, links, choice.num_chunks)
        if name in ALGORITHMS:
            return ScheduledCollectives(name, groups, links, resources)
        return (FlatCollectives if name == "flat" else NativeCollectives)(groups, links)

    made = {name: make(name) for name in choice.names}
    if choice.best is None:
        return made[choice.names[0]]
    return AutoCollectives(made, choice, groups, links)


class AutoCollectives(Collectives):
    """Collectives that choose an algorithm per call; all share comm streams and process groups.

    `run_after` may use any comm stream: its job waits for the reduction of any algorithm.
    """

    def __init__(
        self,
        algorithms: Mapping[str, Collectives],
        choice: AlgorithmChoice,
        groups: Groups,
        links: Links,
    ) -> None:
        super().__init__(groups, links)
        self._algorithms = algorithms
        self._choice = choice

    def run(self, request: Request) -> Event:
        name = next(iter(self._algorithms))
        if request.span:
            name = self._choice.of(request.op, request.span, request.num_bytes)
        return self._algorithms[name].run(request)
