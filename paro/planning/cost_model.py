"""Units of a model as planned, and bytes that each rank sends for the actions of a step."""

# Everything is counted per unit, since padding and the number of gathers differ between units.

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from paro.distributed.byte_counter import Sent
from paro.layout import Shape, UnitLayout
from paro.optim.deal import (
    Matrix,
    Places,
    Round,
    deal,
    first_of_buckets,
    muon_places,
    places_to_deal_to,
    sent_numels,
)
from paro.planning.sending import Sender
from paro.precision import BYTES_OF, PrecisionConfig
from paro.spec.sharding_spec import ShardingSpec
from paro.step.actions import PASS_OF, Move
from paro.step.units import EMPTY, UnitSize
from paro.strategy import Strategy
from paro.topology import Link


def unit_size(
    name: str,
    shapes: Mapping[str, Shape],
    layout: Callable[[Mapping[str, Shape]], UnitLayout],
    is_trained: Callable[[str], bool],
) -> UnitSize:
    """A unit, whose trained and frozen parameters have layouts of their own."""
    of_trained = {name: shape for name, shape in shapes.items() if is_trained(name)}
    of_frozen = {name: shape for name, shape in shapes.items() if name not in of_trained}
    trainable, frozen = (layout(own) if own else EMPTY for own in (of_trained, of_frozen))
    return UnitSize(name=name, trainable=trainable, frozen=frozen, matrices=muon_places(trainable))


def traffic_of(moves: Mapping[Move, int], specs: Sequence[ShardingSpec], sender: Sender) -> Sent:
    """Bytes that a rank sends for the actions of a step, each of which comes so often.

    The all-gather of updated parameters is lazy: a step gathers what the previous one updated. So
    the first step of a run sends less.
    """
    found = exchanged(specs, sender.rank)
    for (verb, number, *_), count in moves.items():
        spec = specs[number]
        # A pass sends as much as a gather, or as a reduction, in several shifts.
        shifts = spec.strategy.params - 1 if verb in PASS_OF else 1
        whole = sender.sent(spec.collectives.get(PASS_OF.get(verb, verb), ()))
        found += Sent(whole.intra // shifts, whole.inter // shifts) * count
    return found


def in_buckets(
    units: Sequence[UnitSize], strategy: Strategy, precision: PrecisionConfig, group_size: int
) -> tuple[UnitSize, ...]:
    """The same units with the buckets in which they are dealt to places."""
    places = places_to_deal_to(strategy, precision, group_size)
    trained = [unit for unit in units if unit.trainable_numel]
    kinds = [(unit.trainable_numel, unit.matrices) if unit.matrices else None for unit in trained]
    dealt = iter(first_of_buckets(kinds, places))
    return tuple(replace(one, dealt=next(dealt)) if one.trainable_numel else one for one in units)


def muon_rounds(specs: Iterable[ShardingSpec]) -> dict[Places, tuple[Round, ...]]:
    """A rank's rounds if Muon updates, by the places among which their matrices are dealt.

    Those of a bucket are all groups' alike: of the unit that each has.
    """
    found: dict[Places, list[Matrix]] = {}
    for number, spec in enumerate(specs):
        if spec.muon_stop and spec.unit.dealt:
            degree = spec.optim_degree
            places = Places(degree if degree > 1 else spec.topology.group_size, degree)
            numel = spec.layout.numel
            matrices = [Matrix(number, numel, *place) for place in spec.unit.matrices]
            found.setdefault(places, []).extend(matrices)
    return {places: deal(tuple(matrices), places.number) for places, matrices in found.items()}


def exchanged(specs: Sequence[ShardingSpec], rank: int | None = None) -> Sent:
    """Bytes that a rank sends in a step to make Muon's matrices whole, and to spread the result.

    Ranks send different amounts: without `rank` it is their mean.
    """
    total, topology = Sent(), specs[0].topology
    of_element = BYTES_OF[specs[0].precision.matrix_wire]
    for places, rounds in muon_rounds(specs).items():
        sent = dict.fromkeys(Link, 0)
        ranks = topology.in_order_of_shards(places.span(topology), rank or 0)
        for (sender, receiver), numel in sent_numels(rounds, places).items():
            inside = ranks[sender] // topology.group_size == ranks[receiver] // topology.group_size
            if rank in (None, ranks[sender]):
                sent[Link.INTRA if inside else Link.INTER] += numel * of_element
        share = places.number if rank is None else 1
        total += Sent(sent[Link.INTRA] // share, sent[Link.INTER] // share)
    return total
