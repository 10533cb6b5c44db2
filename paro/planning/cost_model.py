"""Bytes that a strategy sends and stores on each rank, exactly as the code will."""

# Everything is counted unit by unit, since padding and the number of gathers differ by unit. The
# formulas are for collectives axis by axis; one flat collective over several axes sends more.

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from paro.distributed.byte_counter import Sent
from paro.layout import Shape, make_layout, whole_box
from paro.precision import BYTES_OF, PrecisionConfig
from paro.strategy import Strategy, replicated
from paro.topology import Axis, Link, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitShapes:
    """What a unit holds and how it is used; units are given in forward order."""

    name: str
    shapes: Mapping[str, Shape]
    borrows: tuple[str, ...] = ()  # units whose parameters it reads too (a tied head)
    backward_needs_weight: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSize:
    """The elements of a unit's two flat buffers, padding included, and how often they travel."""

    name: str
    trainable_numel: int
    frozen_numel: int
    gathers_per_micro_batch: int
    borrows: tuple[str, ...] = ()
    gathered_for_backward: bool = True  # apart from its forward's gather
    reductions_per_micro_batch: int = 1
    replicated: bool = False  # params and grads lie whole on every rank, whatever the strategy

    @property
    def numel(self) -> int:
        return self.trainable_numel + self.frozen_numel


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStateBytes:
    """Bytes of model state that stay on every rank throughout a run."""

    params: int
    grads: int
    optim: int

    @property
    def total(self) -> int:
        return self.params + self.grads + self.optim


def size_units(
    units: Sequence[UnitShapes],
    *,
    world_size: int,
    is_trained: Callable[[str], bool] = lambda _name: True,
) -> tuple[UnitSize, ...]:
    """Sizes and gathers of units whose parameters train unless `is_trained` denies their name.

    A unit is gathered before its forward and before its backward. Only once where the backward
    needs no weight (embedding), follows at once (the last unit), or stops above (no parameter at
    or below it trains). Whoever borrows a unit gathers it again.
    """
    trained = (index for index, unit in enumerate(units) if any(map(is_trained, unit.shapes)))
    first_trained = next(trained, len(units))
    again = {
        unit.name: unit.backward_needs_weight and first_trained <= index < len(units) - 1
        for index, unit in enumerate(units)
    }
    num_gathers = dict.fromkeys(again, 0)
    for unit in units:
        for name in (unit.name, *unit.borrows):
            num_gathers[name] += 2 if again[unit.name] else 1
    return tuple(
        UnitSize(
            name=unit.name,
            trainable_numel=_padded_numel(
                {name: shape for name, shape in unit.shapes.items() if is_trained(name)}, world_size
            ),
            frozen_numel=_padded_numel(
                {name: shape for name, shape in unit.shapes.items() if not is_trained(name)},
                world_size,
            ),
            gathers_per_micro_batch=num_gathers[unit.name],
            borrows=unit.borrows,
            gathered_for_backward=again[unit.name],
        )
        for unit in units
    )


def _padded_numel(shapes: Mapping[str, Shape], world_size: int) -> int:
    boxes = [whole_box(name, shape) for name, shape in shapes.items()]
    return make_layout(boxes, decayed=frozenset(), world_size=world_size).numel


def traffic_per_step(
    strategy: Strategy,
    topology: Topology,
    units: Iterable[UnitSize],
    precision: PrecisionConfig,
    num_micro_batches: int,
) -> Sent:
    """Bytes that a rank sends from one optimizer step to the next.

    A pass of a rotation sends of a unit what a gather sends, or a reduction where gradients ride.
    Publishing is lazy: what the step before has updated travels in this one. So the first step
    of a run sends less.
    """
    compute, wire = BYTES_OF[precision.compute], BYTES_OF[precision.wire]
    between, whole_world = topology.axes_between, topology.world_size
    sent = dict.fromkeys(Link, 0)
    for unit in units:
        params, grads, optim = strategy_of(unit, strategy).degrees
        gathered = unit.numel * unit.gathers_per_micro_batch * num_micro_batches
        trained = unit.trainable_numel
        reduced = trained * unit.reductions_per_micro_batch * num_micro_batches
        moves = (
            (between(1, params), gathered * compute),  # before every use
            (between(1, grads), reduced * wire),  # after every backward
            (between(grads, optim), trained * wire),  # finish
            (between(optim, whole_world), 2 * trained * wire),  # all-reduce: in, and back
            (between(params, optim), trained * compute),  # publish
        )
        for run, num_bytes in moves:
            for axis in run:
                sent[axis.link] += _sent_along(axis, num_bytes)
    return Sent(sent[Link.INTRA], sent[Link.INTER])


def strategy_of(unit: UnitSize, strategy: Strategy) -> Strategy:
    """How the states of a unit are spread under a strategy."""
    return replicated(strategy) if unit.replicated else strategy


def _sent_along(axis: Axis, num_bytes: int) -> int:
    """What a rank sends when a buffer whole at degree 1 is gathered or reduced along an axis."""
    assert num_bytes % axis.outer == 0, f"{num_bytes} bytes are not padded for {axis}"
    return num_bytes // axis.inner - num_bytes // axis.outer


def model_state_bytes(
    strategy: Strategy, units: Iterable[UnitSize], precision: PrecisionConfig
) -> ModelStateBytes:
    """Shards of parameters, gradient accumulators, master parameters and Adam's two moments."""
    params = grads = optim = 0
    for unit in units:
        placed = strategy_of(unit, strategy)
        # In fp32 the master is the parameter shard itself where the degrees are equal.
        has_master = precision.compute != "fp32" or placed.params != placed.optim
        params += unit.numel // placed.params * BYTES_OF[precision.compute]
        grads += unit.trainable_numel // placed.grads * BYTES_OF[precision.accumulate]
        optim += unit.trainable_numel // placed.optim * 4 * (3 if has_master else 2)
    return ModelStateBytes(params=params, grads=grads, optim=optim)


def merged(units: Iterable[UnitSize]) -> tuple[UnitSize, ...]:
    """One unit with the elements of all, one more of all that are replicated: equal model states.

    Padded units are multiples of every degree, so that sums may be cut instead of each.
    """
    found: dict[bool, UnitSize] = {}
    for unit in units:
        before = found.get(unit.replicated)
        found[unit.replicated] = replace(
            unit,
            trainable_numel=unit.trainable_numel + (before.trainable_numel if before else 0),
            frozen_numel=unit.frozen_numel + (before.frozen_numel if before else 0),
        )
    return tuple(found.values())


def describe_placement(
    strategy: Strategy, topology: Topology, states: ModelStateBytes
) -> tuple[str, ...]:
    """A table of where every state lies: its degree, the ranks of each full copy, bytes a rank."""
    letters = {1: "N", topology.group_size: "I", topology.world_size: "G"}
    rows = [("state", "level", "degree", "copies", "a full copy on ranks", "MB per rank")]
    for state, degree in zip(("params", "grads", "optim"), strategy.degrees, strict=True):
        rows.append(
            (
                "optimizer" if state == "optim" else state,
                letters.get(degree, "-"),
                str(degree),
                str(topology.world_size // degree),
                _copies(degree, topology.world_size),
                f"{getattr(states, state) / 1e6:.2f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return tuple(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _copies(degree: int, world_size: int) -> str:
    """The ranks of the first copies, and of the last: `0-3 4-7 .. 28-31`."""
    copies = [
        f"{first}-{first + degree - 1}" if degree > 1 else str(first)
        for first in range(0, world_size, degree)
    ]
    return " ".join(copies if len(copies) <= 4 else [*copies[:2], "..", copies[-1]])
