"""The peak memory of a rank: the actions of a step, with what each allocates and frees."""

# In: the schedule of a step, the bytes of its buffers (ShardingSpec) and the activations of its
# units. Out: memory snapshots, where a unit computes or a buffer is reduced or updated; the largest
# is the peak. A snapshot adds up model states, unsharded parameters from gather to release (in
# registered memory: throughout), unsharded gradients until their reduction is waited for, slices
# where weights rotate, fp8 casts of weights, activations saved for backward, and transient bytes of
# a computation, of a reduction's conversion or of the update. Not counted: library workspaces, the
# allocator's rounding, buffers of collectives (counted in run_memory.py for GPUs), RoPE's
# rotations, labels and loss weights (16 bytes per token).

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from paro.planning.activations import UnitActivations
from paro.planning.step_counts import StepCounts
from paro.precision import BYTES_OF
from paro.spec.muon_rounds import muon_rounds
from paro.spec.offload import offloaded, state_bytes
from paro.spec.run_spec import RunSpec
from paro.spec.sharding_spec import ShardingSpec
from paro.spec.units import registered_param_buffers
from paro.step.actions import Action, ActionKind
from paro.step.schedule import LISTED_MICRO_BATCHES

_ALLOCATIONS = {  # the kind of bytes that an action allocates (1) or frees (-1)
    ActionKind.GATHER: ("whole_params", 1),
    ActionKind.RELEASE: ("whole_params", -1),
    ActionKind.ALLOCATE: ("whole_grads", 1),
    ActionKind.FREE: ("whole_grads", -1),
    ActionKind.ALLOCATE_SLOT: ("slices", 1),
    ActionKind.FREE_SLOT: ("slices", -1),
}
_COUNTED = {
    *_ALLOCATIONS,
    ActionKind.CACHE_FP8,
    ActionKind.DROP_FP8,
    ActionKind.GRAD_SYNC,
    ActionKind.UPDATE,
}
_COUNTED |= {kind for kind in ActionKind if kind >= ActionKind.FORWARD}


class MemorySnapshot(NamedTuple):
    """The bytes that are allocated on a rank at one point of a step, by kind."""

    name: str
    states: int = 0
    whole_params: int = 0
    whole_grads: int = 0
    slices: int = 0  # bytes of slots for slices of parameters and gradients that rotate
    casts: int = 0  # bytes of cached fp8 weights
    activations: int = 0
    transient: int = 0
    # Elements of unsharded buffers of which a shard is copied, for a reduction or for the update.
    converted: int = 0
    bucket_size: int = 1  # number of units in the bucket that is reduced
    updated: int = 0

    @property
    def total(self) -> int:
        whole = self.whole_params + self.whole_grads
        return self.states + whole + self.slices + self.casts + self.activations + self.transient

    def parts(self) -> dict[str, int]:
        """Return the bytes of the total by name of kind."""
        whole = {"whole parameters": self.whole_params, "whole gradients": self.whole_grads}
        return {
            "model states": self.states,
            **({"slices under way": self.slices} if self.slices else whole),
            **({"weights in fp8": self.casts} if self.casts else {}),
            "activations": self.activations,
            "transient": self.transient,
        }

    def with_copies(self, run: RunSpec, specs: Sequence[ShardingSpec]) -> MemorySnapshot:
        """Add the bytes of copied shards and, in the update, of Muon's whole matrices."""
        strategy, precision = run.strategy, run.precision
        nothing_left = strategy.grads == strategy.optim == run.world_size
        wire, accumulate = precision.wire, precision.accumulate
        of_converted = 0 if nothing_left or wire == accumulate else BYTES_OF[wire]
        of_updated = 0 if accumulate == "fp32" else 4
        copied = self.converted // strategy.grads * of_converted
        if self.bucket_size > 1:  # reduced unit by unit inside groups, then as a bucket between
            degree = strategy.optim // self.bucket_size
            of_part = of_converted if strategy.grads == degree else BYTES_OF[wire]
            copied = max(copied, self.bucket_size * self.converted // degree * of_part)
        copied += self.updated // strategy.optim * of_updated
        if self.updated and precision.optimizer == "muon":
            wire_bytes = BYTES_OF[precision.matrix_wire]
            sizes = (rounds.peak_bytes(wire_bytes) for rounds in muon_rounds(specs))
            copied += max(sizes, default=0)
        if self.updated:
            copied += sum(offloaded(specs).slots)
        return self._replace(transient=self.transient + copied) if copied else self


@dataclass(kw_only=True, eq=False)
class StepTally:
    """A tally of allocated bytes, updated by carrying out the actions of a step one by one."""

    run: RunSpec
    step: StepCounts
    specs: Sequence[ShardingSpec]  # of the buffers, by number
    activations: Sequence[tuple[str, UnitActivations]]  # name and bytes of every unit, or part

    def __post_init__(self) -> None:
        self.now: Counter[str] = Counter()  # allocated bytes by kind
        self._saved: Counter[int] = Counter()
        self._slices_done: Counter[int] = Counter()  # slices with a finished backward, by part
        self._cached: set[int] = set()  # buffers whose weights' casts are cached
        self._cast: set[int] = set()  # units whose weights' casts exist
        self._registered = registered_param_buffers(self.run, self.step.units)
        self.now["whole_params"] = sum(size * number for size, number in self._registered.values())

    @property
    def total(self) -> int:
        """The allocated bytes without model states."""
        return sum(self.now.values())

    def columns(self, now: MemorySnapshot) -> dict[str, int]:
        """Return a snapshot's bytes by column; the total has model states and transient bytes."""
        held = {"params": now.whole_params + now.casts, "grads": now.whole_grads}
        if self.run.materialize.rotates:
            held = {"slices": now.slices}
        states = state_bytes(self.specs, self.run.device_type)
        total = states.total + now.with_copies(self.run, self.specs).total
        return {**held, "activations": now.activations, "total": total}

    def largest(self) -> list[MemorySnapshot]:
        """Carry out a step; return the largest snapshot for each combination of copied elements."""
        # Where weights rotate, all micro-batches allocate equally.
        most = 1 if self.run.materialize.rotates else LISTED_MICRO_BATCHES
        actions = self.step.schedule(min(self.run.num_micro_batches, most)).actions()
        largest: dict[tuple[int, ...], MemorySnapshot] = {}
        for now in map(self.carry_out, (action for action in actions if action[0] in _COUNTED)):
            if now is not None:
                copied = now.converted, now.bucket_size, now.updated
                if now.total > largest.setdefault(copied, now).total:
                    largest[copied] = now
        return [*largest.values()]

    def carry_out(self, action: Action) -> MemorySnapshot | None:
        """Carry out an action; return a snapshot, without model states, if bytes may peak there."""
        kind, number, *slots = action
        if kind >= ActionKind.FORWARD:
            return self._compute(kind, number)
        unit, index = self.step.buffers[number].unit, self.step.buffers[number].unit_index
        if kind in _ALLOCATIONS:
            counted, sign = _ALLOCATIONS[kind]
            sign *= counted != "whole_params" or not self._registered
            self.now[counted] += sign * self._sizes[number][slots[0] if slots else counted]
        if kind in (ActionKind.RELEASE, ActionKind.DROP_FP8):
            self._cached.discard(number)
            self._cast_weights(index, exist=False)
        elif kind is ActionKind.CACHE_FP8:
            self._cached.add(number)
        elif kind is ActionKind.UPDATE:
            return self.at("the update", updated=unit.trainable.numel)
        elif kind is ActionKind.GRAD_SYNC:
            copied = {"converted": unit.trainable.numel, "bucket_size": unit.bucket_size}
            return self.at(f"the reduction of {unit.name}", **copied)
        return None

    def _compute(self, kind: ActionKind, index: int) -> MemorySnapshot | None:
        shape, (name, activations) = self.step.shape, self.activations[index]
        if kind in (ActionKind.FORWARD, ActionKind.RECOMPUTE):
            if any(not self._cached.isdisjoint(needed) for needed in shape.halves(index)):
                self._cast_weights(index, exist=True)
            if kind is ActionKind.RECOMPUTE:
                self._save(index, activations.kept + activations.recomputed)
                return None
            self._save(index, activations.kept if index >= shape.first_trained else 0)
            return self.at(f"the forward of {name}", activations.in_forward)
        if kind is ActionKind.LOSS:
            return self.at(f"the forward of {name}", activations.in_loss)
        if kind is ActionKind.BACKWARD:
            return self.at(f"the backward of {name}", activations.before_gradients)
        now = self.at(f"the backward of {name}", activations.in_backward)
        self._slices_done[index] += 1
        if self._slices_done[index] % (shape.num_slices * len(shape.halves(index))) == 0:
            self._save(index, activations.kept_to_the_end)
            if index == shape.first_trained:  # this is the last unit of backward
                self._saved.clear()
                self.now["activations"] = 0
        return now

    def _save(self, index: int, num_bytes: int) -> None:
        self.now["activations"] += num_bytes - self._saved[index]
        self._saved[index] = num_bytes

    def _cast_weights(self, index: int, *, exist: bool) -> None:
        if exist is not (index in self._cast):
            self._cast ^= {index}
            size = self.activations[index][1].casts
            self.now["casts"] += size if exist else -size

    def at(self, name: str = "", transient: int = 0, **copied: int) -> MemorySnapshot:
        """Take a snapshot without model states."""
        return MemorySnapshot(name, transient=transient, **self.now, **copied)

    @cached_property
    def _sizes(self) -> list[Mapping[str | int, int]]:
        """The bytes of every unsharded buffer, and of each slot of slices, by buffer number."""
        return self.step.by_kind(lambda number: self._sizes_of(self.specs[number]))

    def _sizes_of(self, spec: ShardingSpec) -> Mapping[str | int, int]:
        whole = {"whole_params": ActionKind.GATHER, "whole_grads": ActionKind.REDUCE}
        sizes: dict[str | int, int] = {
            name: sum(each.num_bytes for each in spec.collectives.get(kind, ()))
            for name, kind in whole.items()
        }
        slots = spec.slots(self.run.device_type).items() if self.run.materialize.rotates else ()
        return sizes | {slot: numel * BYTES_OF[dtype] for slot, (numel, dtype) in slots}
