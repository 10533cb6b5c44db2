"""Bytes that each rank sends and stores under a strategy, exactly as in training."""

# Everything is counted per unit, since padding and the number of gathers differ between units.

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from paro.collectives.schedule import Op
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
from paro.optim.states import master_is_param, optimizer_bytes
from paro.planning.sending import Collective, Sender
from paro.precision import BYTES_OF, PrecisionConfig
from paro.quantization.ranges import GRADIENT_BLOCK, UPDATE_BLOCK, RangeCodes, codes_along
from paro.step.actions import PASS_OF, Move, Verb
from paro.step.units import EMPTY, UnitSize, buffers_of
from paro.strategy import Strategy, make_comm_plan, replicated
from paro.topology import Link, Topology, Use, split_by_link


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStateBytes:
    """Bytes of model state that every rank holds throughout a run."""

    params: int
    grads: int
    optim: int

    @property
    def total(self) -> int:
        return self.params + self.grads + self.optim


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


def traffic_of(
    moves: Mapping[Move, int],
    units: Sequence[UnitSize],
    strategy: Strategy,
    topology: Topology,
    precision: PrecisionConfig,
    sender: Sender,
) -> Sent:
    """Bytes that a rank sends for the actions of a step, each of which comes so often.

    The all-gather of updated parameters is lazy: a step gathers what the previous one updated. So
    the first step of a run sends less.
    """
    found = exchanged(units, strategy, topology, precision, sender.rank)
    buffers = buffers_of(units)
    for (verb, number, *_), count in moves.items():
        unit, trains, _ = buffers[number]
        sent = unit_collectives(unit, strategy, topology, precision)[
            PASS_OF.get(verb, verb), trains
        ]
        # A pass sends as much as a gather, or as a reduction, in several shifts.
        shifts = strategy.params - 1 if verb in PASS_OF else 1
        whole = sender.sent(sent)
        found += Sent(whole.intra // shifts, whole.inter // shifts) * count
    return found


def muon_stop(unit: UnitSize, precision: PrecisionConfig) -> int:
    """Muon updates the elements of a unit before this one."""
    return unit.matrix_stop if unit.matrices and precision.optimizer == "muon" else 0


def in_buckets(
    units: Sequence[UnitSize], strategy: Strategy, precision: PrecisionConfig, group_size: int
) -> tuple[UnitSize, ...]:
    """The same units with the buckets in which they are dealt to places."""
    places = places_to_deal_to(strategy, precision, group_size)
    trained = [unit for unit in units if unit.trainable_numel]
    kinds = [(unit.trainable_numel, unit.matrices) if unit.matrices else None for unit in trained]
    dealt = iter(first_of_buckets(kinds, places))
    return tuple(replace(one, dealt=next(dealt)) if one.trainable_numel else one for one in units)


def muon_rounds(
    units: Iterable[UnitSize], strategy: Strategy, precision: PrecisionConfig, group_size: int
) -> dict[Places, tuple[Round, ...]]:
    """A rank's rounds if Muon updates, by the places among which their matrices are dealt.

    Those of a bucket are all groups' alike: of the unit that each has.
    """
    found: dict[Places, list[Matrix]] = {}
    for number, unit in enumerate(units if precision.optimizer == "muon" else ()):
        if unit.matrices and unit.dealt:
            degree = strategy.optim // unit.dealt
            places = Places(degree if degree > 1 else group_size, degree)
            matrices = [Matrix(number, unit.trainable_numel, *place) for place in unit.matrices]
            found.setdefault(places, []).extend(matrices)
    return {places: deal(tuple(matrices), places.number) for places, matrices in found.items()}


def exchanged(
    units: Iterable[UnitSize],
    strategy: Strategy,
    topology: Topology,
    precision: PrecisionConfig,
    rank: int | None = None,
) -> Sent:
    """Bytes that a rank sends in a step to make Muon's matrices whole, and to spread the result.

    Ranks send different amounts: without `rank` it is their mean.
    """
    total = Sent()
    size = topology.group_size
    for places, rounds in muon_rounds(units, strategy, precision, size).items():
        sent = dict.fromkeys(Link, 0)
        ranks = topology.in_order_of_shards(places.span(topology), rank or 0)
        for (sender, receiver), numel in sent_numels(rounds, places).items():
            inside = ranks[sender] // size == ranks[receiver] // size
            if rank in (None, ranks[sender]):
                sent[Link.INTRA if inside else Link.INTER] += (
                    numel * BYTES_OF[precision.matrix_wire]
                )
        share = places.number if rank is None else 1
        total += Sent(sent[Link.INTRA] // share, sent[Link.INTER] // share)
    return total


def unit_collectives(
    unit: UnitSize, strategy: Strategy, topology: Topology, precision: PrecisionConfig
) -> dict[tuple[Verb, bool], tuple[Collective, ...]]:
    """What the actions on a unit's buffers send: by verb, and whether the buffer trains."""
    own = strategy_of(unit, strategy)
    plan = make_comm_plan(own, topology)
    compute, frozen = BYTES_OF[precision.compute], BYTES_OF[precision.frozen]
    wire, numel = BYTES_OF[precision.wire], unit.trainable_numel
    of_bucket = numel * unit.dealt
    step_reduce, replicas, gather_updated = (
        span if unit.dealt else ()
        for span in (plan.step_reduce, plan.replicas, plan.gather_updated)
    )
    of_updates, codes = codes_of(unit, own, topology, precision)
    updated = (of_bucket * compute, compute)
    if of_updates is not None:
        updated = of_updates.range_bytes * own.optim, 1
    gather, reduce = (Use.GATHER, Op.ALL_GATHER), (Use.REDUCE, Op.REDUCE_SCATTER)
    summed: tuple[Collective, ...] = (
        Collective(*reduce, step_reduce, of_bucket * wire, wire),
        Collective(Use.REDUCE, Op.ALL_REDUCE, replicas, of_bucket * wire, wire),
    )
    if codes is not None:
        intra, inter = split_by_link((*plan.step_reduce, *plan.replicas))
        encoded = codes.range_bytes * topology.world_size
        summed = (
            Collective(*reduce, intra, numel * wire, wire),
            Collective(Use.EXCHANGE, Op.REDUCE_SCATTER, inter, encoded, 1),
            Collective(Use.EXCHANGE, Op.ALL_GATHER, plan.replicas, encoded, 1),
        )
    return {
        (Verb.GATHER, True): (Collective(*gather, plan.gather, numel * compute, compute),),
        (Verb.GATHER, False): (
            Collective(*gather, plan.gather, unit.frozen_numel * frozen, frozen),
        ),
        (Verb.REDUCE, True): (Collective(*reduce, plan.reduce, numel * wire, wire),),
        (Verb.STEP_REDUCE, True): summed,
        (Verb.GATHER_UPDATED, True): (Collective(*gather, gather_updated, *updated),),
    }


def codes_of(
    unit: UnitSize, strategy: Strategy, topology: Topology, precision: PrecisionConfig
) -> tuple[RangeCodes | None, RangeCodes | None]:
    """How a unit's updated parameters and its gradients are encoded; None if sent exactly."""
    numel = unit.trainable_numel
    if not (numel and precision.has_codes):
        return None, None
    plan = make_comm_plan(strategy, topology)
    slice_numel = numel // unit.num_slices
    along = partial(codes_along, slice_numel=slice_numel, matrix_stop=unit.matrix_stop)
    updates = along(
        plan.gather_updated,
        bits=precision.inter_param_bits,
        block=UPDATE_BLOCK,
        numel=numel // strategy.optim,
        uncoded_bytes=BYTES_OF[precision.compute],
    )
    gradients = along(
        (*plan.step_reduce, *plan.replicas),
        bits=precision.inter_grad_bits,
        block=GRADIENT_BLOCK,
        numel=numel // topology.world_size,
        uncoded_bytes=BYTES_OF[precision.wire],
    )
    return updates, gradients


def strategy_of(unit: UnitSize, strategy: Strategy) -> Strategy:
    """How a unit's states are sharded: replicated units keep params and grads whole."""
    return replicated(strategy) if unit.replicated else strategy


def model_state_bytes(
    strategy: Strategy, units: Iterable[UnitSize], precision: PrecisionConfig
) -> ModelStateBytes:
    """Bytes per rank of parameters, gradient accumulators, master parameters and Adam moments."""
    params = grads = optim = 0
    for unit in units:
        placed = strategy_of(unit, strategy)
        has_master = not master_is_param(placed, is_fp32=precision.compute == "fp32")
        params += unit.trainable_numel // placed.params * BYTES_OF[precision.compute]
        params += unit.frozen_numel // placed.params * BYTES_OF[precision.frozen]
        grads += unit.trainable_numel // placed.grads * BYTES_OF[precision.accumulate]
        numel, stop = unit.trainable_numel, muon_stop(unit, precision)
        size = numel * unit.dealt // placed.optim
        optim += optimizer_bytes(precision, numel, stop, size, has_master=has_master)
    return ModelStateBytes(params=params, grads=grads, optim=optim)
