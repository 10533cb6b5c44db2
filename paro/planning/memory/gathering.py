"""Peak memory of a rank where parameters are gathered, from a walk through one step."""

# The walk follows sharding/sharded_model.py: forward through all units, then backward, then the
# update. At each point it adds up
#
#   model states   shards that stay throughout
#   whole params   the running unit and the prefetched ones, in the order of use
#   whole grads    unit-sized gradient buffers that wait for their reduction
#   weights in fp8 with their transposes: those of all units in a step where parameters stay, else
#                  those of the unit that is recomputed
#   activations    kept for backward by the units that have run forward
#   transient      extra memory of the computation, of a reduction's conversion or of the update
#
# and the largest sum is the peak. Not counted: library workspaces, the allocator's rounding,
# buffers of collectives (device.py counts those on GPUs), RoPE's rotations, labels and loss weights
# (16 bytes per token).

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from paro.planning.cost_model import UnitSize, first_trained, merged, model_state_bytes
from paro.planning.units import UnitActivations, matmuls_write
from paro.precision import BYTES_OF, PrecisionConfig
from paro.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySnapshot:
    """Bytes that are alive on a rank at one point of a step."""

    name: str
    states: int
    whole_params: int = 0
    whole_grads: int = 0
    slices: int = 0  # of parameters and gradients that rotate
    casts: int = 0  # of weights, in fp8
    activations: int = 0
    transient: int = 0

    @property
    def total(self) -> int:
        whole = self.whole_params + self.whole_grads
        return self.states + whole + self.slices + self.casts + self.activations + self.transient

    def parts(self) -> dict[str, int]:
        """The parts of the total by name, in bytes."""
        whole = {"whole parameters": self.whole_params, "whole gradients": self.whole_grads}
        return {
            "model states": self.states,
            **({"slices under way": self.slices} if self.slices else whole),
            **({"weights in fp8": self.casts} if self.casts else {}),
            "activations": self.activations,
            "transient": self.transient,
        }

    def describe(self) -> str:
        """One line with all parts that are not 0, in GB, or in MB if the total is below 1 GB."""
        unit, scale = ("GB", 1e9) if self.total >= 1e9 else ("MB", 1e6)
        parts = ((name, size) for name, size in self.parts().items() if size)
        listed = ", ".join(f"{name} {size / scale:.1f}" for name, size in parts)
        return f"{self.total / scale:.1f} {unit} at {self.name}: {listed}"


class _Point(NamedTuple):
    """A snapshot without what depends on the size of a degree: model states and copies."""

    snapshot: MemorySnapshot
    converted: int = 0  # elements of the gradients that a reduction converts
    updated: int = 0  # elements of the largest unit, whose gradients the update copies


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """The peaks of many strategies for one model and batch, from at most four walks.

    Whole parameters and gradients depend only on whether their degree is 1. Of points with equal
    copies only the largest is kept.
    """

    world_size: int
    units: tuple[UnitSize, ...]
    precision: PrecisionConfig
    activations: tuple[UnitActivations, ...]
    prefetch_units: int
    num_micro_batches: int
    device_type: str

    def of(self, strategy: Strategy) -> MemorySnapshot:
        """The memory snapshot of a step with the largest total."""
        kind = strategy.params > 1, strategy.grads > 1
        if kind not in self._largest:
            self._largest[kind] = self._largest_of(*kind)
        states = model_state_bytes(strategy, self._merged, self.precision).total
        converts, copies = self._conversion_bytes(strategy), fp32_copy_bytes(self.precision)
        found = (
            replace(
                snapshot,
                states=states,
                transient=snapshot.transient
                + converted // strategy.grads * converts
                + updated // strategy.optim * copies,
            )
            for snapshot, converted, updated in self._largest[kind]
        )
        return max(found, key=lambda snapshot: snapshot.total)

    @cached_property
    def _largest(self) -> dict[tuple[bool, bool], list[_Point]]:
        return {}

    @cached_property
    def _merged(self) -> tuple[UnitSize, ...]:
        return merged(self.units)

    def _largest_of(self, params_sharded: bool, grads_sharded: bool) -> list[_Point]:
        """The largest point for each pair of copies."""
        largest: dict[tuple[int, int], _Point] = {}
        for point in self._walk(params_sharded, grads_sharded):
            key = point.converted, point.updated
            if key not in largest or point.snapshot.total > largest[key].snapshot.total:
                largest[key] = point
        return list(largest.values())

    def _walk(self, params_sharded: bool, grads_sharded: bool) -> Iterator[_Point]:
        """A micro-batch in the middle of a step, and the update."""
        earlier = self._trained if self._repeats else ()  # units whose gradients arrived last
        arrived: tuple[int, ...] = earlier
        for index, unit in enumerate(self.units):
            own = self.activations[index]
            transient = own.in_forward
            if own.writes_in_forward is not None and unit.trainable_numel:
                transient = own.writes_in_forward[self._grad_bytes(grads_sharded) == 4]
                arrived = (*earlier, index)
            yield _Point(
                MemorySnapshot(
                    name=f"the forward of {unit.name}",
                    states=0,
                    whole_params=self._whole_params(index, 1) if params_sharded else 0,
                    whole_grads=self._whole_grads(arrived) if grads_sharded else 0,
                    casts=0 if params_sharded else self._casts(index + 1),
                    activations=self._kept(index + 1),
                    transient=transient,
                )
            )
        for index in self._backward:
            unit, own = self.units[index], self.activations[index]
            before, after = own.before_gradients, own.in_backward
            if own.direct is not None and self._is_direct(grads_sharded):
                before, after = own.direct
            together = range(own.recomputed_from, index + 1)
            recomputed = sum(self.activations[i].recomputed for i in together)
            casts = self._casts(len(self.units))
            if params_sharded:
                casts = sum(self.activations[i].casts for i in together) if recomputed else 0
            now_arrived = arrived
            if unit.trainable_numel and arrived[-1:] != (index,):
                now_arrived = (*arrived, index)
            params = self._whole_params(self._position(index), len(together))
            backward = MemorySnapshot(
                name=f"the backward of {unit.name}",
                states=0,
                whole_params=params if params_sharded else 0,
                whole_grads=self._whole_grads(arrived) if grads_sharded else 0,
                casts=casts,
                activations=self._kept(index + 1) + recomputed,
                transient=before,
            )
            yield _Point(backward)
            grads = self._whole_grads(now_arrived) if grads_sharded else 0
            yield _Point(replace(backward, whole_grads=grads, transient=after))
            yield _Point(
                replace(
                    backward,
                    name=f"the reduction of {unit.name}",
                    whole_grads=grads,
                    activations=self._kept(index),
                    transient=0,
                ),
                converted=unit.trainable_numel,
            )
            arrived = now_arrived[-self._num_whole_grads :]
        largest = max(unit.trainable_numel for unit in self.units)
        yield _Point(MemorySnapshot(name="the update", states=0), updated=largest)

    def _is_direct(self, grads_sharded: bool) -> bool:
        return matmuls_write(self._grad_type(grads_sharded), self.precision, self.device_type)

    def _grad_bytes(self, grads_sharded: bool) -> int:
        return BYTES_OF[self._grad_type(grads_sharded)]

    def _grad_type(self, grads_sharded: bool) -> str:
        """The type of the buffer for the gradients of a micro-batch."""
        return self.precision.wire if grads_sharded else self.precision.accumulate

    @property
    def _repeats(self) -> bool:
        """Whether another micro-batch precedes and follows."""
        return self.num_micro_batches > 1

    @property
    def _num_whole_grads(self) -> int:
        return 2 if self.prefetch_units else 1

    @cached_property
    def _trained(self) -> tuple[int, ...]:
        """Units with gradients, in the order in which the gradients arrive."""
        return tuple(i for i in self._backward if self.units[i].trainable_numel)

    @cached_property
    def _backward(self) -> range:
        """Units that run backward: from the last to the first that trains."""
        return range(len(self.units) - 1, first_trained(self.units) - 1, -1)

    @cached_property
    def _order(self) -> tuple[int, ...]:
        """Units in the order of their gathers; the last one's backward needs no second gather."""
        forward = range(len(self.units))
        back = (i for i in self._backward[1:] if self.units[i].gathered_for_backward)
        return (*forward, *back, *(forward if self._repeats else ()))

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
        num_live = max(1 + self.prefetch_units, num_together)
        live: set[str] = set()
        for index in self._order[position : position + num_live]:
            needed = {self.units[index].name, *self.units[index].borrows}
            if needed & live:
                break
            live |= needed
        units = [self._by_name[name] for name in live]
        trained = sum(unit.trainable_numel for unit in units) * BYTES_OF[self.precision.compute]
        return trained + sum(u.frozen_numel for u in units) * BYTES_OF[self.precision.frozen]

    def _whole_grads(self, arrived: Sequence[int]) -> int:
        """Bytes of gradient buffers not yet freed when these units' gradients arrived, in order."""
        waiting = set(arrived[-self._num_whole_grads :])
        numel = sum(self.units[index].trainable_numel for index in waiting)
        return numel * BYTES_OF[self.precision.wire]

    def _casts(self, num_units: int) -> int:
        """Bytes of all weights in fp8 that stay when the first units have run forward."""
        ran = self.activations if self._repeats else self.activations[:num_units]
        return sum(unit.casts for unit in ran)

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

    def _conversion_bytes(self, strategy: Strategy) -> int:
        """Bytes per element of the copy that is reduced after accumulation; 0 if there is none."""
        nothing_left = strategy.grads == strategy.optim == self.world_size
        if nothing_left or self.precision.wire == self.precision.accumulate:
            return 0
        return BYTES_OF[self.precision.wire]


def fp32_copy_bytes(precision: PrecisionConfig) -> int:
    """Bytes per element of the fp32 gradient copy in the update; 0 if there is none."""
    return 0 if precision.accumulate == "fp32" else 4
