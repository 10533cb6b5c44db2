"""Peak memory of a rank where parameters are gathered, from a walk through one step."""

# The walk follows sharding/sharded_model.py: forward through all units, then backward, then the
# update. At each point it adds up
#
#   model states   shards that stay throughout
#   whole params   the running unit and the prefetched ones, in the order of use
#   whole grads    unit-sized gradient buffers that wait for their reduction
#   activations    kept for backward by the units that have run forward
#   transient      extra memory of the computation, of a reduction's conversion or of the update
#
# and the largest sum is the peak. Not counted: library workspaces, the allocator's rounding,
# staging buffers of a backend (gloo some MB, flat collectives a whole unit), RoPE's rotations,
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
    """Bytes that are alive on a rank at one point of a step."""

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
        """The parts of the total by name, in bytes."""
        whole = {"whole parameters": self.whole_params, "whole gradients": self.whole_grads}
        return {
            "model states": self.states,
            **({"slices under way": self.slices} if self.slices else whole),
            "activations": self.activations,
            "transient": self.transient,
        }

    def describe(self) -> str:
        """One line with all parts that are not 0, in GB, or in MB if the total is below 1 GB."""
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
    """The memory snapshot of a step with the largest total."""
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

    Apart from the model states, only two parts of a snapshot depend on the size of a degree: the
    copy converted for a reduction, and the update's copy. Of snapshots that are otherwise equal
    only the largest is kept.
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
        """The memory snapshot of a step with the largest total."""
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
        """The largest snapshot for each pair of (elements to convert, elements to update)."""
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
    """A walk through a micro-batch in the middle of a step, and the update."""

    strategy: Strategy
    topology: Topology
    units: tuple[UnitSize, ...]
    precision: PrecisionConfig
    activations: tuple[UnitActivations, ...]
    num_live: int  # units that are gathered, or being gathered
    num_whole_grads: int
    repeats: bool  # another micro-batch precedes and follows

    def moments(self) -> Iterator[MemorySnapshot]:
        states = model_state_bytes(self.strategy, self.units, self.precision).total
        before = self._trained if self.repeats else ()  # units whose gradients arrived last
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
        """Units with gradients, in the order in which the gradients arrive."""
        return tuple(i for i in self._backward if self.units[i].trainable_numel)

    @cached_property
    def _backward(self) -> range:
        """Units that run backward: from the last to the first that trains."""
        trained = (i for i, unit in enumerate(self.units) if unit.trainable_numel)
        first = next(trained, len(self.units))
        return range(len(self.units) - 1, first - 1, -1)

    @cached_property
    def _order(self) -> tuple[int, ...]:
        """Units in the order of their gathers; the last one's backward needs no second gather."""
        forward = range(len(self.units))
        back = (i for i in self._backward[1:] if self.units[i].gathered_for_backward)
        return (*forward, *back, *(forward if self.repeats else ()))

    def _position(self, index: int) -> int:
        """The position in `_order` at which a unit's backward runs."""
        last = len(self.units) - 1
        return (
            last
            + (self._again[last] - self._again[index])
            + (not self.units[index].gathered_for_backward and index < last)
        )

    @cached_property
    def _again(self) -> list[int]:
        """Prefix counts: how many of the first n units are gathered for backward."""
        return list(accumulate((u.gathered_for_backward for u in self.units), initial=0))

    def _whole_params(self, position: int, num_together: int) -> int:
        """Bytes of the units from a position in `_order` on, up to one that is already live."""
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
        """Bytes of gradient buffers not yet freed when these units' gradients arrived, in order."""
        if self.strategy.grads == 1:
            return 0
        waiting = set(arrived[-self.num_whole_grads :])
        numel = sum(self.units[index].trainable_numel for index in waiting)
        return numel * BYTES_OF[self.precision.wire]

    def _kept(self, num_units: int) -> int:
        """Bytes kept by the first units before their backward, and by the others to the end."""
        first = self._backward.stop + 1  # below the first that trains nothing is kept
        kept, to_the_end = self._sums
        return max(0, kept[num_units] - kept[min(first, num_units)]) + (
            to_the_end[-1] - to_the_end[num_units]
        )

    @cached_property
    def _sums(self) -> tuple[list[int], list[int]]:
        """Prefix sums over the first n units: bytes kept, and the part kept to the end."""
        kept = [unit.kept for unit in self.activations]
        to_the_end = [unit.kept_to_the_end for unit in self.activations]
        return list(accumulate(kept, initial=0)), list(accumulate(to_the_end, initial=0))

    @cached_property
    def _by_name(self) -> dict[str, UnitSize]:
        return {unit.name: unit for unit in self.units}

    def _converted(self, unit: UnitSize) -> int:
        """Bytes of the copy in the communication dtype of what is reduced after accumulation."""
        return unit.trainable_numel // self.strategy.grads * self.conversion_bytes()

    def conversion_bytes(self) -> int:
        """Bytes per element of the copy that is reduced after accumulation; 0 if there is none."""
        grads, optim = self.strategy.grads, self.strategy.optim
        nothing_left = grads == optim == self.topology.world_size
        if nothing_left or self.precision.wire == self.precision.accumulate:
            return 0
        return BYTES_OF[self.precision.wire]

    def _fp32_grads(self) -> int:
        """Bytes of the fp32 copy of a unit's gradients that the update reads."""
        largest = max(unit.trainable_numel for unit in self.units)
        return largest // self.strategy.optim * self.copy_bytes()

    def copy_bytes(self) -> int:
        """Bytes per element of the fp32 gradient copy in the update; 0 if there is none."""
        return 0 if self.precision.accumulate == "fp32" else 4
