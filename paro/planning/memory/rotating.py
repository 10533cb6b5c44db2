"""Peak memory of a rank where weights rotate: the actions of a step, added up."""

# As in gathering.py, over the actions of a micro-batch (paro/step/rotation_plan.py), all of which
# are alike. In addition to the model states it counts:
#
#   slices        the slots that are allocated (paro/step/rotating.py)
#   activations   a block keeps as much as without slices, since those add up: attention keeps x, q,
#                 k, v and its output, the MLP its input, gate and up. The loss keeps its input and,
#                 per token and slice, a label's row and a log-sum-exp, but no gradients
#   transient     gradients of input and output, and the work with one slice: a partial output in
#                 addition to the sum, the MLP's gradients and one matrix gradient of a slice, if
#                 the matmul cannot write it into its buffer

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from model.config import LOSS_CHUNK_TOKENS, LlamaConfig
from paro.layout import chunk_numel
from paro.planning.cost_model import UnitSize, model_state_bytes
from paro.planning.memory.gathering import (
    MOST_MICRO_BATCHES,
    MemorySnapshot,
    Point,
    fp32_copy_bytes,
)
from paro.planning.micro_batch import MicroBatch
from paro.planning.rotation import ring_shape, rotation_shape, unit_parts
from paro.planning.units import (
    block_activations,
    embedding_adds_rows,
    matmuls_write,
    norm_backward,
)
from paro.precision import BYTES_OF, PrecisionConfig
from paro.step.actions import Move, Verb
from paro.step.plan import StepPlan
from paro.step.rotating import RingShape, Slot
from paro.step.rotation_plan import RotationShape, rotation_plan
from paro.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartBytes:
    """The bytes that a part keeps for backward, and its transient bytes."""

    kept: int
    recomputed: int = 0  # what its recomputation finds in addition to what is kept
    in_forward: int
    in_backward: int

    def keeping(self, needed: int, kept: int | None) -> _PartBytes:
        """With what its backward needs; if only some of it is `kept`, it is recomputed."""
        if kept is None:
            return replace(self, kept=needed)
        in_forward = self.in_forward + needed
        return replace(self, kept=kept, recomputed=needed - kept, in_forward=in_forward)


def rotating_peak(
    strategy: Strategy,
    units: Sequence[UnitSize],
    precision: PrecisionConfig,
    config: LlamaConfig,
    batch: MicroBatch,
    *,
    in_place: bool,
) -> MemorySnapshot:
    """The snapshot of a step with the largest total; `units` are those of planning/rotation.py."""
    in_ring = ring_shape(strategy, precision, in_place=in_place)
    shape, parts, slot_bytes = _counted(in_ring, units, precision, config, batch)
    copied = max(unit.trainable_numel for unit in units) // strategy.optim
    update = "the update", 0, 0, copied * fp32_copy_bytes(precision)
    computed = _computed(shape, parts, slot_bytes)
    name, slices, activations, transient = max((update, *computed), key=lambda m: sum(m[1:]))
    return MemorySnapshot(
        name=name,
        states=model_state_bytes(strategy, units, precision).total,
        slices=slices,
        activations=activations,
        transient=transient,
    )


_Counted = tuple[RotationShape, tuple[tuple[str, _PartBytes], ...], list[dict[int, int]]]


def _counted(
    ring: RingShape,
    units: Sequence[UnitSize],
    precision: PrecisionConfig,
    config: LlamaConfig,
    batch: MicroBatch,
) -> _Counted:
    """What actions depend on, the parts with their bytes, and every buffer's bytes by slot."""
    shape = rotation_shape(config, tuple(units), ring)
    direct = matmuls_write(precision.wire, precision, batch.device_type)
    sizes = [
        (numel, kind)
        for unit in units
        for numel, kind in (
            (unit.trainable_numel, precision.compute),
            (unit.frozen_numel, precision.frozen),
        )
        if numel
    ]
    by_size = {
        size: _slot_bytes(*size, ring.num_steps, precision, batch.device_type) for size in {*sizes}
    }
    parts = tuple(_parts(config, batch, shape, direct=direct))
    return shape, parts, [by_size[size] for size in sizes]


class SliceTally:
    """What is allocated while the actions of a step are carried out, from no slices on."""

    columns = ("slices", "activations", "total")

    def __init__(
        self,
        strategy: Strategy,
        units: Sequence[UnitSize],
        precision: PrecisionConfig,
        config: LlamaConfig,
        batch: MicroBatch,
        *,
        in_place: bool,
    ) -> None:
        self.strategy, self.units, self.precision = strategy, units, precision
        ring = ring_shape(strategy, precision, in_place=in_place)
        self.shape, self._parts, self._slot_bytes = _counted(ring, units, precision, config, batch)
        self._states = model_state_bytes(strategy, units, precision).total
        self._unit_of = [unit for unit in units for _ in unit.kind.trains]
        self._slices = 0
        self._kept = [0] * len(self._parts)
        self._done = [0] * len(self._parts)  # slices whose backward has run

    def plan(self, num_micro_batches: int, updated_ahead: int | None = None) -> StepPlan:
        """The actions of a step, of three micro-batches at most."""
        return rotation_plan(self.shape, min(num_micro_batches, MOST_MICRO_BATCHES), updated_ahead)

    def computing(self, action: Move) -> tuple[int, str]:
        """What a computing action is about: a buffer of its part, and the part's name."""
        _, number, *(half,) = action
        halves = self.shape.parts[number].halves
        which = f" {half + 1}/2" if len(halves) > 1 else ""
        return halves[half][0], f"{self._parts[number][0]}{which}"

    def alive(self, point: Point) -> tuple[int, ...]:
        """Bytes at a point, by column; the total with the model states and what computes."""
        now, copied = point.snapshot, point.updated // self.strategy.optim
        total = self._states + now.total + copied * fp32_copy_bytes(self.precision)
        return now.slices, now.activations, total

    def carry_out(self, action: Move) -> Point | None:
        """The point at which something computes."""
        verb, number, *slots = action
        if verb is Verb.ALLOCATE_SLOT:
            self._slices += self._slot_bytes[number][slots[0]]
        elif verb is Verb.FREE_SLOT:
            self._slices -= self._slot_bytes[number][slots[0]]
        elif verb is Verb.UPDATE:
            return Point(self.point("the update"), updated=self._unit_of[number].trainable_numel)
        elif verb in (Verb.FORWARD, Verb.RECOMPUTE):
            name, part = self._parts[number]
            recomputed = verb is Verb.RECOMPUTE
            self._kept[number] = part.kept + (part.recomputed if recomputed else 0)
            return Point(self.point(f"the forward of {name}", 0 if recomputed else part.in_forward))
        elif verb is Verb.GRADIENTS:
            name, part = self._parts[number]
            point = self.point(f"the backward of {name}", part.in_backward)
            halves = len(self.shape.parts[number].halves)
            self._done[number] += 1
            if self._done[number] == self.shape.ring.num_steps * halves:
                self._done[number] = self._kept[number] = 0
            return Point(point)
        return None

    def point(self, name: str, transient: int = 0) -> MemorySnapshot:
        """What is alive now, without model states."""
        return MemorySnapshot(
            name=name,
            states=0,
            slices=self._slices,
            activations=sum(self._kept),
            transient=transient,
        )


def _slot_bytes(
    numel: int, kind: str, degree: int, precision: PrecisionConfig, device_type: str
) -> dict[int, int]:
    """The bytes of a buffer's slots."""
    found: dict[int, int] = {}
    for slots, scratch, dtype in (
        ((Slot.SPARE, Slot.SPARE_2), Slot.SCRATCH, kind),
        ((Slot.GRAD, Slot.GRAD_2), Slot.GRAD_SCRATCH, precision.wire),
    ):
        size = BYTES_OF[dtype]
        found |= dict.fromkeys(slots, numel // degree * size)
        found[scratch] = 2 * chunk_numel(numel // degree, size, device_type=device_type) * size
    return found


_Alive = frozenset[tuple[int, int]]  # buffers and slots


@lru_cache(maxsize=64)
def _moments(shape: RotationShape) -> tuple[tuple[Verb, int, _Alive], ...]:
    """What is computed, and what is alive meanwhile; what is the same for all slices once.

    GRADIENTS of a part come once more with nothing alive when its backward has ended.
    """
    alive: set[tuple[int, int]] = set()
    found: dict[tuple[Verb, int, _Alive], None] = {}
    to_come = [shape.ring.num_steps * len(part.halves) for part in shape.parts]
    for action in rotation_plan(shape, 1).actions():
        verb, number, *more = action
        if verb is Verb.ALLOCATE_SLOT:
            alive.add((number, more[0]))
        elif verb is Verb.FREE_SLOT:
            alive.remove((number, more[0]))
        elif verb in (Verb.FORWARD, Verb.RECOMPUTE, Verb.GRADIENTS):
            found[verb, number, frozenset(alive)] = None
            if verb is Verb.GRADIENTS:
                to_come[number] -= 1
                if not to_come[number]:
                    found[verb, number, frozenset()] = None
    return tuple(found)


def _computed(
    shape: RotationShape,
    parts: Sequence[tuple[str, _PartBytes]],
    slot_bytes: Sequence[dict[int, int]],
) -> Iterator[tuple[str, int, int, int]]:
    """What is computed, with the bytes of slices and activations, and transient ones."""
    kept = [0] * len(parts)
    activations = 0
    for verb, number, alive in _moments(shape):
        name, part = parts[number]
        if verb is Verb.GRADIENTS and alive:
            slices = sum(slot_bytes[buffer][slot] for buffer, slot in alive)
            yield f"the backward of {name}", slices, activations, part.in_backward
            continue
        size = 0 if verb is Verb.GRADIENTS else part.kept
        size += part.recomputed if verb is Verb.RECOMPUTE else 0
        activations += size - kept[number]
        kept[number] = size
        if verb is Verb.FORWARD:
            slices = sum(slot_bytes[buffer][slot] for buffer, slot in alive)
            yield f"the forward of {name}", slices, activations, part.in_forward


def _parts(
    config: LlamaConfig, batch: MicroBatch, shape: RotationShape, *, direct: bool
) -> Iterator[tuple[str, _PartBytes]]:
    """The parts by name, in forward order; `direct`: matmuls write gradients into their buffers."""
    tokens, size = batch.num_tokens, batch.compute_bytes
    residual = tokens * config.hidden_size * size
    mlp = residual + 2 * tokens * config.ffn_hidden_size * size
    needed = {"attention": block_activations(config, batch) - mlp, "mlp": mlp}
    begins = {group[0] for group in shape.recomputed}
    of_blocks: dict[tuple[object, ...], _PartBytes] = {}  # most are alike
    for index, (spec, part) in enumerate(unit_parts(config)):
        own = shape.parts[index]
        steps = shape.ring.num_steps * len(own.halves)
        if part.method == "look_up":
            found = _look_up(config, batch, steps, direct=direct)
        elif part.method == "loss":
            found = _loss(config, batch, steps, direct=direct)
        else:
            key = part.method, steps, own.recomputed, index in begins
            if key not in of_blocks:
                kept = (residual if index in begins else 0) if own.recomputed else None
                block = _of_block(config, batch, steps, direct=direct)
                of_blocks[key] = block.keeping(needed[part.method], kept)
            found = of_blocks[key]
        if index < shape.first_trained:
            found = replace(found, kept=0, recomputed=0)
        yield f"{spec.name}.{part.method}" if len(spec.parts) > 1 else spec.name, found


def _look_up(config: LlamaConfig, batch: MicroBatch, steps: int, *, direct: bool) -> _PartBytes:
    tokens, size = batch.num_tokens, batch.compute_bytes
    residual = tokens * config.hidden_size * size
    by_rows = direct and embedding_adds_rows(batch)
    vocabulary = -(-config.vocab_size // steps) * config.hidden_size * size
    return _PartBytes(
        kept=tokens * 9 * steps,
        in_forward=3 * residual,
        in_backward=2 * residual + (0 if by_rows else vocabulary),
    )


def _of_block(config: LlamaConfig, batch: MicroBatch, steps: int, *, direct: bool) -> _PartBytes:
    tokens, size = batch.num_tokens, batch.compute_bytes
    residual = tokens * config.hidden_size * size
    columns = -(-config.ffn_hidden_size // steps)
    ffn = tokens * columns * size
    matrix = 0 if direct else columns * config.hidden_size * size
    norm = norm_backward(config, batch)
    return _PartBytes(
        kept=0,
        in_forward=2 * residual + max(residual, ffn),
        in_backward=max(3 * residual + 3 * ffn + matrix, 2 * residual + norm + 2 * matrix),
    )


def _loss(config: LlamaConfig, batch: MicroBatch, steps: int, *, direct: bool) -> _PartBytes:
    tokens, size = batch.num_tokens, batch.compute_bytes
    residual = tokens * config.hidden_size * size
    rows = -(-config.vocab_size // steps)
    chunk = min(tokens, LOSS_CHUNK_TOKENS) * rows
    gradient = 0 if direct else rows * config.hidden_size * size
    return _PartBytes(
        kept=2 * residual + tokens * (4 + 20 * steps),
        in_forward=residual + chunk * (4 + size % 4),
        in_backward=2 * residual + max(chunk * (4 + size % 4), chunk * size + gradient),
    )
