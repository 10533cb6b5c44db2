"""Peak memory of a rank: the actions of a step, with what each allocates and frees."""

# Where a unit computes, and in a step's reduction and update, a snapshot adds up
#
#   model states   shards that stay throughout
#   whole params   between a buffer's gather and its release, but in registered memory throughout
#   whole grads    unit-sized gradient buffers, until their reduction is waited for
#   slices         where weights rotate: the slots that are allocated (paro/step/slices.py)
#   weights in fp8 with their transposes: those of all units where parameters stay for several
#                  micro-batches, else those of the units that are recomputed
#   activations    kept for backward by the units that have run forward
#   transient      extra memory of the computation, of a reduction's conversion or of the update
#
# and the largest sum is the peak. Not counted: library workspaces, the allocator's rounding,
# buffers of collectives (device.py counts those on GPUs), RoPE's rotations, labels and loss weights
# (16 bytes per token).

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from paro.planning.activations import UnitActivations
from paro.planning.passes import StepCounts
from paro.precision import BYTES_OF
from paro.spec.muon_rounds import muon_rounds
from paro.spec.run_spec import RunSpec
from paro.spec.sharding_spec import ShardingSpec, state_bytes
from paro.spec.units import registered_room
from paro.step.actions import Move, Verb
from paro.step.schedule import LISTED_MICRO_BATCHES

_ALLOCATIONS = {  # what it counts as, and whether it is allocated or freed
    Verb.GATHER: ("whole_params", 1),
    Verb.RELEASE: ("whole_params", -1),
    Verb.ALLOCATE: ("whole_grads", 1),
    Verb.FREE: ("whole_grads", -1),
    Verb.ALLOCATE_SLOT: ("slices", 1),
    Verb.FREE_SLOT: ("slices", -1),
}
_COUNTED = {*_ALLOCATIONS, Verb.CACHE_FP8, Verb.DROP_FP8, Verb.GRAD_SYNC, Verb.UPDATE}
_COUNTED |= {verb for verb in Verb if verb >= Verb.FORWARD}


class MemorySnapshot(NamedTuple):
    """Bytes that are alive on a rank at one point of a step."""

    name: str
    states: int = 0
    whole_params: int = 0
    whole_grads: int = 0
    slices: int = 0  # of parameters and gradients that rotate
    casts: int = 0  # of weights, in fp8
    activations: int = 0
    transient: int = 0
    # Elements of whole units, whose shard a reduction converts, or the update copies.
    converted: int = 0
    bucket_size: int = 1  # units of the bucket that is reduced
    updated: int = 0

    @property
    def total(self) -> int:
        whole = self.whole_params + self.whole_grads
        return self.states + whole + self.slices + self.casts + self.activations + self.transient

    def parts(self) -> dict[str, int]:
        """Return the parts of the total by name, in bytes."""
        whole = {"whole parameters": self.whole_params, "whole gradients": self.whole_grads}
        return {
            "model states": self.states,
            **({"slices under way": self.slices} if self.slices else whole),
            **({"weights in fp8": self.casts} if self.casts else {}),
            "activations": self.activations,
            "transient": self.transient,
        }

    def with_copies(self, run: RunSpec, specs: Sequence[ShardingSpec]) -> MemorySnapshot:
        """With the bytes of these shards, and in the update of matrices that Muon makes whole."""
        strategy, precision = run.strategy, run.precision
        nothing_left = strategy.grads == strategy.optim == run.world_size
        wire, accumulate = precision.wire, precision.accumulate
        of_converted = 0 if nothing_left or wire == accumulate else BYTES_OF[wire]
        of_updated = 0 if accumulate == "fp32" else 4
        copied = self.converted // strategy.grads * of_converted
        if self.bucket_size > 1:  # inside groups unit by unit, then between them all together
            degree = strategy.optim // self.bucket_size
            of_part = of_converted if strategy.grads == degree else BYTES_OF[wire]
            copied = max(copied, self.bucket_size * self.converted // degree * of_part)
        copied += self.updated // strategy.optim * of_updated
        if self.updated and precision.optimizer == "muon":
            wire_bytes = BYTES_OF[precision.matrix_wire]
            sizes = (rounds.peak_bytes(wire_bytes) for rounds in muon_rounds(specs))
            copied += max(sizes, default=0)
        return self._replace(transient=self.transient + copied) if copied else self


@dataclass(kw_only=True, eq=False)
class StepTally:
    """What is allocated while the actions of a step are carried out, from model states alone on."""

    run: RunSpec
    step: StepCounts
    activations: Sequence[tuple[str, UnitActivations]]  # of every unit, or part, by name

    def __post_init__(self) -> None:
        self.now: Counter[str] = Counter()  # bytes by kind
        self._kept: Counter[int] = Counter()
        self._slices_done: Counter[int] = Counter()  # in backward
        self._keeps: set[int] = set()  # buffers whose weights' casts stay
        self._cast: set[int] = set()  # units whose weights' casts exist
        self.now["whole_params"] = sum(size * number for size, number in self.registered.values())

    @property
    def total(self) -> int:
        """Bytes that are alive now, without model states."""
        return sum(self.now.values())

    def alive(self, now: MemorySnapshot) -> dict[str, int]:
        """Return bytes at a point, by column; the total with the model states and what computes."""
        held = {"params": now.whole_params + now.casts, "grads": now.whole_grads}
        if self.run.materialize.rotates:
            held = {"slices": now.slices}
        total = state_bytes(self.specs).total + now.with_copies(self.run, self.specs).total
        return {**held, "activations": now.activations, "total": total}

    def largest(self) -> list[MemorySnapshot]:
        """Of the points of a step that copy the same, the largest; without model states."""
        found: dict[tuple[int, ...], MemorySnapshot] = {}
        counted = (move for move in self._actions() if move[0] in _COUNTED)
        for now in filter(None, map(self.carry_out, counted)):
            copied = now.converted, now.bucket_size, now.updated
            largest = found.setdefault(copied, now)
            if now.total > largest.total:
                found[copied] = now
        return [*found.values()]

    def _actions(self) -> Iterator[Move]:
        # Where weights rotate, micro-batches allocate the same.
        most = 1 if self.run.materialize.rotates else LISTED_MICRO_BATCHES
        return self.step.schedule(min(self.run.num_micro_batches, most)).actions()

    @cached_property
    def registered(self) -> dict[bool, tuple[int, int]]:
        """The memory for whole parameters that copy engines fill: see `registered_room`."""
        return registered_room(self.run, self.step.units)

    def carry_out(self, move: Move) -> MemorySnapshot | None:
        """Follow an action; what is alive, without model states, if it computes or copies."""
        verb, number, *slots = move
        if verb >= Verb.FORWARD:
            return self._compute(verb, number)
        unit, _, index = self.step.buffers[number]
        if verb in _ALLOCATIONS:
            counted, sign = _ALLOCATIONS[verb]
            sign *= counted != "whole_params" or not self.registered
            self.now[counted] += sign * self._sizes[number][slots[0] if slots else counted]
        if verb in (Verb.RELEASE, Verb.DROP_FP8):
            self._keeps.discard(number)
            self._cast_weights(index, exist=False)
        elif verb is Verb.CACHE_FP8:
            self._keeps.add(number)
        elif verb is Verb.UPDATE:
            return self.at("the update", updated=unit.trainable_numel)
        elif verb is Verb.GRAD_SYNC:
            copied = {"converted": unit.trainable_numel, "bucket_size": unit.bucket_size}
            return self.at(f"the reduction of {unit.name}", **copied)
        return None

    def _compute(self, verb: Verb, index: int) -> MemorySnapshot | None:
        shape, (name, own) = self.step.shape, self.activations[index]
        if verb in (Verb.FORWARD, Verb.RECOMPUTE):
            if any(not self._keeps.isdisjoint(needed) for needed in shape.halves(index)):
                self._cast_weights(index, exist=True)
            if verb is Verb.RECOMPUTE:
                self._keep(index, own.kept + own.recomputed)
                return None
            self._keep(index, own.kept if index >= shape.first_trained else 0)
            return self.at(f"the forward of {name}", own.in_forward)
        if verb is Verb.LOSS:
            return self.at(f"the forward of {name}", own.in_loss)
        if verb is Verb.BACKWARD:
            return self.at(f"the backward of {name}", own.before_gradients)
        now = self.at(f"the backward of {name}", own.in_backward)
        self._slices_done[index] += 1
        if self._slices_done[index] % (shape.num_slices * len(shape.halves(index))) == 0:
            self._keep(index, own.kept_to_the_end)
            if index == shape.first_trained:  # the end of backward
                self._kept.clear()
                self.now["activations"] = 0
        return now

    def _keep(self, index: int, num_bytes: int) -> None:
        self.now["activations"] += num_bytes - self._kept[index]
        self._kept[index] = num_bytes

    def _cast_weights(self, index: int, *, exist: bool) -> None:
        if exist is not (index in self._cast):
            self._cast ^= {index}
            size = self.activations[index][1].casts
            self.now["casts"] += size if exist else -size

    def at(self, name: str = "", transient: int = 0, **copied: int) -> MemorySnapshot:
        """What is alive."""
        return MemorySnapshot(name, transient=transient, **self.now, **copied)

    @cached_property
    def specs(self) -> list[ShardingSpec]:
        """How the buffers are sharded, by their numbers."""
        return self.run.specs(self.step.units)

    @cached_property
    def _sizes(self) -> list[Mapping[str | int, int]]:
        """Bytes of every buffer, whole, and of the slots of its slices."""
        known = {first: self._sizes_of(self.specs[first]) for first in {*self.step.alike}}
        return [known[first] for first in self.step.alike]

    def _sizes_of(self, spec: ShardingSpec) -> Mapping[str | int, int]:
        whole = {"whole_params": Verb.GATHER, "whole_grads": Verb.REDUCE}
        found: dict[str | int, int] = {
            kind: sum(one.num_bytes for one in spec.collectives.get(verb, ()))
            for kind, verb in whole.items()
        }
        slots = spec.slots(self.run.device_type).items() if self.run.materialize.rotates else ()
        return found | {slot: numel * BYTES_OF[dtype] for slot, (numel, dtype) in slots}
