"""The process groups of a run: all ranks make them, and the planner counts them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from paro.collectives.choice import AlgorithmChoice
from paro.collectives.schedule import Op
from paro.collectives.spans import needed_groups
from paro.spec.muon_rounds import muon_rounds
from paro.spec.run_spec import RunSpec
from paro.spec.sharding_spec import Collective, ShardingSpec
from paro.step.actions import PASS_OF
from paro.topology import COLLECTIVE_STREAMS, AxisSpan, Spans, StreamKind


class RunGroups(NamedTuple):
    """The axis spans of a run's process groups."""

    states: Spans  # on the topology of the model states
    context: Spans  # on that of the ranks that share samples

    @property
    def number(self) -> int:
        """The number of process groups that have a rank."""
        return sum(map(len, chain(self.states.values(), self.context.values())))


def groups_of(run: RunSpec, specs: Sequence[ShardingSpec], choice: AlgorithmChoice) -> RunGroups:
    """Return the process groups of a run with these buffers, whose collectives are by
    the `choice`."""
    of_context = run.context.groups(run.context_topology, choice)
    return RunGroups(_of_states(run, specs, choice), of_context)


def collectives_of(run: RunSpec, specs: Iterable[ShardingSpec]) -> set[Collective]:
    """Return the different collectives; those that are a pass round a ring rotate."""
    passes = PASS_OF.values() if run.materialize.rotates else ()
    return {
        one._replace(stream_kind=StreamKind.ROTATE) if verb in passes else one
        for spec in {(s.unit.traffic_kind, s.buffer.trains): s for s in specs}.values()
        for verb, collectives in spec.collectives.items()
        for one in collectives
    }


def _of_states(run: RunSpec, specs: Sequence[ShardingSpec], choice: AlgorithmChoice) -> Spans:
    """Return the process groups of model states: of all that a step sends, with codes and without.

    Where there are codes, the first steps of a run send none.
    """
    spans: defaultdict[StreamKind, set[AxisSpan]] = defaultdict(set)
    for one in collectives_of(run, specs) | collectives_of(run, (spec.exact for spec in specs)):
        by_axis = one.stream_kind is StreamKind.EXCHANGE and one.op is Op.ALL_GATHER
        spans[one.stream_kind].update(((axis,) for axis in one.span) if by_axis else [one.span])
    spans[StreamKind.EXCHANGE].update(rounds.span(run.topology) for rounds in muon_rounds(specs))
    along = {kind: frozenset(filter(None, of_kind)) for kind, of_kind in spans.items()}
    by_algorithms = {kind: along.pop(kind, frozenset()) for kind in COLLECTIVE_STREAMS}
    return {**along, **needed_groups(choice, by_algorithms)}
