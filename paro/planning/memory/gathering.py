"""The most memory that a rank needs, by walking through a step."""

# The walk is that of sharding/engine.py: forward through all units, then back, then the update. At
# each moment it adds up
#
#   model states   shards that stay throughout
#   whole params   the unit that runs and those gathered ahead, in the order of use
#   whole grads    unit-sized gradient buffers that wait for their reduction
#   activations    what the units passed in forward keep for backward
#   transient      what the computation, the conversion for a reduction or the update needs besides
#
# and the largest sum is the answer. Not counted: the libraries' own workspaces, the allocator's
# rounding, what a backend stages (gloo some MB, flat collectives a whole unit), the rotations,
# labels and loss weights (16 bytes per token).

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from paro.planning.cost_model import UnitSize, merged, model_state_bytes
from paro.planning.units import UnitActivations
from paro.precision import BYTES_OF, PrecisionConfig
from paro.strategy import Strategy
from paro.topology import Topology

UPDATE = "the update"
REDUCTION = "the reduction of "


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySnapshot:
    """What is alive on a rank at one point of a step, in bytes."""

    name: str
    states: int
    whole_params: int = 0
    whole_grads: int = 0
    slices: int = 0  # of parameters and gradients that rotate
    activations: int = 0
    transient: int = 0

    @property
    def total(self) -> int:
        whole = self.whole_params + self.whole_grads
        return self.states + whole + self.slices + self.activations + self.transient

    def parts(self) -> dict[str, int]:
        """What the total is made of, in bytes."""
        whole = {"whole parameters": self.whole_params, "whole gradients": self.whole_grads}
        return {
            "model states": self.states,
            **({"slices under way": self.slices} if self.slices else whole),
            "activations": self.activations,
            "transient": self.transient,
        }

    def describe(self) -> str:
        """One line with the parts that there are, in GB, or in MB where all is less than 1 GB."""
        unit, scale = ("GB", 1e9) if self.total >= 1e9 else ("MB", 1e6)
        parts = ((name, size) for name, size in self.parts().items() if size)
        listed = ", ".join(f"{name} {size / scale:.1f}" for name, size in parts)
        return f"{self.total / scale:.1f} {unit} at {self.name}: {listed}"


def peak_memory(
    strategy: Strategy,
    topology: Topology,
    units: Sequence[UnitSize],
    precision: PrecisionConfig,
    activations: Sequence[UnitActivations],
    *,
    prefetch_units: int,
    num_micro_batches: int,
) -> MemorySnapshot:
    """The moment of a step at which a rank needs most memory."""
    walk = _Walk(
        strategy=strategy,
        topology=topology,
        units=tuple(units),
        precision=precision,
        activations=tuple(activations),
        num_live=1 + prefetch_units,
        num_whole_grads=2 if prefetch_units else 1,
        repeats=num_micro_batches > 1,
    )
    return max(walk.moments(), key=lambda snapshot: snapshot.total)


class PeakMemory:
    """`peak_memory` for many strategies of one model and batch, from few walks.

    Beside the model states, only two things at a moment depend on how large a degree is: what is
    converted for a reduction, and what the update copies. Of moments that are otherwise alike the
    largest is enough.
    """

    def __init__(
        self,
        units: Sequence[UnitSize],
        precision: PrecisionConfig,
        activations: Sequence[UnitActivations],
        *,
        prefetch_units: int,
        num_micro_batches: int,
    ) -> None:
        self._units = tuple(units)
        self._merged = merged(self._units)
        self._precision = precision
        self._activations = tuple(activations)
        self._num_live = 1 + prefetch_units
        self._num_whole_grads = 2 if prefetch_units else 1
        self._repeats = num_micro_batches > 1
        self._kinds: dict[tuple[bool, bool], list[tuple[MemorySnapshot, int, int]]] = {}

    def of(self, strategy: Strategy, topology: Topology) -> MemorySnapshot:
        """The moment of a step at which a rank needs most memory."""
        kind = strategy.params > 1, strategy.grads > 1
        if kind not in self._kinds:
            self._kinds[kind] = self._largest(strategy, topology)
        walk = self._walk(strategy, topology)
        states = model_state_bytes(strategy, self._merged, self._precision).total
        converts, copies = walk.conversion_bytes(), walk.copy_bytes()
        found = (
            replace(
                snapshot,
                states=states,
                transient=snapshot.transient
                + converted // strategy.grads * converts
                + updated // strategy.optim * copies,
            )
            for snapshot, converted, updated in self._kinds[kind]
        )
        return max(found, key=lambda snapshot: snapshot.total)

    def _walk(self, strategy: Strategy, topology: Topology) -> _Walk:
        return _Walk(
            strategy=strategy,
            topology=topology,
            units=self._units,
            precision=self._precision,
            activations=self._activations,
            num_live=self._num_live,
            num_whole_grads=self._num_whole_grads,
            repeats=self._repeats,
        )

    def _largest(
        self, strategy: Strategy, topology: Topology
    ) -> list[tuple[MemorySnapshot, int, int]]:
        """Of the moments with the same elements to convert and to update, the largest."""
        largest: dict[tuple[int, int], MemorySnapshot] = {}
        sizes = {unit.name: unit.trainable_numel for unit in self._units}
        for snapshot in self._walk(strategy, topology).moments():
            reduces = snapshot.name.startswith(REDUCTION)
            updates = snapshot.name == UPDATE
            key = (
                sizes[snapshot.name.removeprefix(REDUCTION)] if reduces else 0,
                max(sizes.values()) if updates else 0,
            )
            own = replace(snapshot, states=0, transient=0 if any(key) else snapshot.transient)
            if key not in largest or own.total > largest[key].total:
                largest[key] = own
        return [(snapshot, *key) for key, snapshot in largest.items()]


@dataclass(frozen=True, kw_only=True)
class _Walk:
    """One micro-batch in the midst of a step, and the update."""

    strategy: Strategy
    topology: Topology
    units: tuple[UnitSize, ...]
    precision: PrecisionConfig
    activations: tuple[UnitActivations, ...]
    num_live: int  # units that are whole, or on the way there
    num_whole_grads: int
    repeats: bool  # another micro-batch precedes and follows

    def moments(self) -> Iterator[MemorySnapshot]:
        states = model_state_bytes(self.strategy, self.units, self.precision).total
        before = self._trained if self.repeats else ()  # whose gradients came last
        for index, unit in enumerate(self.units):
            yield MemorySnapshot(
                name=f"the forward of {unit.name}",
                states=states,
                whole_params=self._whole_params(index, 1),
                whole_grads=self._whole_grads(before),
                activations=self._kept(index + 1),
                transient=self.activations[index].in_forward,
            )
        arrived: tuple[int, ...] = tuple(before)
        for index in self._backward:
            unit, own = self.units[index], self.activations[index]
            together = range(own.recomputed_from, index + 1)
            recomputed = sum(self.activations[i].recomputed for i in together)
            now_arrived = (*arrived, index) if unit.trainable_numel else arrived
            backward = MemorySnapshot(
                name=f"the backward of {unit.name}",
                states=states,
                whole_params=self._whole_params(self._position(index), len(together)),
                whole_grads=self._whole_grads(arrived),
                activations=self._kept(index + 1) + recomputed,
                transient=own.before_gradients,
            )
            yield backward
            whole_grads = self._whole_grads(now_arrived)
            yield replace(backward, whole_grads=whole_grads, transient=own.in_backward)
            yield replace(
                backward,
                name=f"{REDUCTION}{unit.name}",
                whole_grads=whole_grads,
                activations=self._kept(index),
                transient=self._converted(unit),
            )
            arrived = now_arrived[-self.num_whole_grads :]
        yield MemorySnapshot(name=UPDATE, states=states, transient=self._fp32_grads())

    @cached_property
    def _trained(self) -> tuple[int, ...]:
        """Units with gradients, in the order in which those arrive."""
        return tuple(i for i in self._backward if self.units[i].trainable_numel)

    @cached_property
    def _backward(self) -> range:
        """Units that backward passes: from the last to the first that trains."""
        trained = (i for i, unit in enumerate(self.units) if unit.trainable_numel)
        first = next(trained, len(self.units))
        return range(len(self.units) - 1, first - 1, -1)

    @cached_property
    def _order(self) -> tuple[int, ...]:
        """Units in the order in which they are gathered; the last one's backward needs no more."""
        forward = range(len(self.units))
        back = (i for i in self._backward[1:] if self.units[i].gathered_for_backward)
        return (*forward, *back, *(forward if self.repeats else ()))

    def _position(self, index: int) -> int:
        """Where in that order the backward of a unit comes."""
        last = len(self.units) - 1
        return (
            last
            + (self._again[last] - self._again[index])
            + (not self.units[index].gathered_for_backward and index < last)
        )

    @cached_property
    def _again(self) -> list[int]:
        """How many of the first units are gathered for backward, by their number."""
        return list(accumulate((u.gathered_for_backward for u in self.units), initial=0))

    def _whole_params(self, position: int, num_together: int) -> int:
        """Units from a position of the order on, up to one that is live already."""
        if self.strategy.params == 1:
            return 0
        live: set[str] = set()
        for index in self._order[position : position + max(self.num_live, num_together)]:
            needed = {self.units[index].name, *self.units[index].borrows}
            if needed & live:
                break
            live |= needed
        return sum(self._by_name[name].numel for name in live) * BYTES_OF[self.precision.compute]

    def _whole_grads(self, arrived: Sequence[int]) -> int:
        """The buffers that have not been given up when these units' gradients have come in turn."""
        if self.strategy.grads == 1:
            return 0
        waiting = set(arrived[-self.num_whole_grads :])
        numel = sum(self.units[index].trainable_numel for index in waiting)
        return numel * BYTES_OF[self.precision.wire]

    def _kept(self, num_units: int) -> int:
        """What the first units keep while backward has not come to them."""
        first = self._backward.stop + 1  # below the first that trains nothing is kept
        kept, to_the_end = self._sums
        return max(0, kept[num_units] - kept[min(first, num_units)]) + (
            to_the_end[-1] - to_the_end[num_units]
        )

    @cached_property
    def _sums(self) -> tuple[list[int], list[int]]:
        """What the first units keep, and what of it until the end, by their number."""
        kept = [unit.kept for unit in self.activations]
        to_the_end = [unit.kept_to_the_end for unit in self.activations]
        return list(accumulate(kept, initial=0)), list(accumulate(to_the_end, initial=0))

    @cached_property
    def _by_name(self) -> dict[str, UnitSize]:
        return {unit.name: unit for unit in self.units}

    def _converted(self, unit: UnitSize) -> int:
        """The copy in the wire's type of what is reduced after accumulation."""
        return unit.trainable_numel // self.strategy.grads * self.conversion_bytes()

    def conversion_bytes(self) -> int:
        """Of an element that is reduced after accumulation: the copy in the wire's type."""
        grads, optim = self.strategy.grads, self.strategy.optim
        nothing_left = grads == optim == self.topology.world_size
        if nothing_left or self.precision.wire == self.precision.accumulate:
            return 0
        return BYTES_OF[self.precision.wire]

    def _fp32_grads(self) -> int:
        """The copy of a unit's gradients that the update reads."""
        largest = max(unit.trainable_numel for unit in self.units)
        return largest // self.strategy.optim * self.copy_bytes()

    def copy_bytes(self) -> int:
        """Of an element in the update: the fp32 copy of its gradient."""
        return 0 if self.precision.accumulate == "fp32" else 4
