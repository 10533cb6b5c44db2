"""Peak memory of a rank where weights rotate, from a walk through one step."""

# As in gathering.py, a walk through a step, here over the parts of planning/rotation.py. In
# addition to the model states it counts:
#
#   slices        those of the running part, as the note in rotation/rotating_unit.py lists them
#   activations   a block keeps as much as without slices, since those add up: attention keeps x, q,
#                 k, v and its output, the MLP its input, gate and up. The loss keeps its input and,
#                 per token and slice, a label's row and a log-sum-exp, but no gradients
#   transient     gradients of input and output, and the work with one slice: a partial output in
#                 addition to the sum, the MLP's gradients and one matrix gradient of a slice, if
#                 the matmul cannot write it into its buffer

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from model.config import LOSS_CHUNK_TOKENS, LlamaConfig
from model.units import UnitSpec, unit_specs
from paro.layout import chunk_numel
from paro.planning.cost_model import UnitSize, model_state_bytes
from paro.planning.memory.gathering import MemorySnapshot, fp32_copy_bytes
from paro.planning.rotation import units_by_part
from paro.planning.units import (
    MicroBatch,
    block_activations,
    embedding_adds_rows,
    matmuls_write,
    norm_backward,
)
from paro.precision import BYTES_OF, PrecisionConfig
from paro.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A part in the walk: bytes that it keeps for backward, and its transient bytes."""

    name: str
    unit: UnitSize
    kept: int
    recomputed: int = 0  # bytes of its block's recomputation that its backward finds
    in_forward: int
    in_backward: int
    returns: bool = True
    copies: bool = False  # its first forward rotates copies, not this rank's own slice


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
    walk = _Walk(
        strategy=strategy,
        units=tuple(units),
        precision=precision,
        in_place=in_place,
        device_type=batch.device_type,
        parts=tuple(
            _parts(
                config,
                batch,
                units_by_part(units),
                strategy.params,
                direct=matmuls_write(precision.wire, precision, batch.device_type),
            )
        ),
    )
    return max(walk.snapshots(), key=lambda snapshot: snapshot.total)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Walk:
    strategy: Strategy
    units: tuple[UnitSize, ...]
    precision: PrecisionConfig
    in_place: bool
    device_type: str
    parts: tuple[_Part, ...]

    def snapshots(self) -> Iterator[MemorySnapshot]:
        states = model_state_bytes(self.strategy, self.units, self.precision).total
        kept = 0
        for part in self.parts:
            kept += part.kept
            yield MemorySnapshot(
                name=f"the forward of {part.name}",
                states=states,
                slices=self._forward_slices(part),
                activations=kept,
                transient=part.in_forward,
            )
        for part in reversed(self.parts):
            yield MemorySnapshot(
                name=f"the backward of {part.name}",
                states=states,
                slices=self._backward_slices(part),
                activations=kept + part.recomputed,
                transient=part.in_backward,
            )
            kept -= part.kept
        largest = max(unit.trainable_numel for unit in self.units)
        copied = largest // self.strategy.optim * fp32_copy_bytes(self.precision)
        yield MemorySnapshot(name="the update", states=states, transient=copied)

    def _forward_slices(self, part: _Part) -> int:
        slice_bytes = self._weights(part.unit)
        if self.in_place:
            return self._room(slice_bytes) + (slice_bytes if part.copies else 0)
        return slice_bytes * (2 if part.copies and self.strategy.params > 2 else 1)

    def _backward_slices(self, part: _Part) -> int:
        weights = self._weights(part.unit) if part.returns else 0
        grads = self._slice(part.unit.trainable_numel, self.precision.wire)
        if self.in_place:
            rooms = (self._room(weights), self._room(grads))
            shared = self.precision.compute == self.precision.wire
            return grads + (max(rooms) if shared else sum(rooms))
        return weights + 2 * grads

    def _weights(self, unit: UnitSize) -> int:
        trained = self._slice(unit.trainable_numel, self.precision.compute)
        return trained + self._slice(unit.frozen_numel, self.precision.frozen)

    def _slice(self, numel: int, kind: str) -> int:
        return numel // self.strategy.params * BYTES_OF[kind]

    def _room(self, slice_bytes: int) -> int:
        return 2 * chunk_numel(slice_bytes, 1, device_type=self.device_type)


def _largest(units: Sequence[UnitSize]) -> UnitSize:
    return max(units, key=lambda unit: unit.numel)


def _parts(
    config: LlamaConfig,
    batch: MicroBatch,
    units: dict[str, list[UnitSize]],
    degree: int,
    *,
    direct: bool,
) -> Iterator[_Part]:
    """The parts in forward order; `direct`: matmuls write gradients into their buffers."""
    tokens, size = batch.num_tokens, batch.compute_bytes
    residual = tokens * config.hidden_size * size
    steps = degree * len(units["embedding"])
    rows = -(-config.vocab_size // steps)
    vocabulary = rows * config.hidden_size * size
    by_rows = direct and embedding_adds_rows(batch)
    yield _Part(
        name="embedding",
        unit=_largest(units["embedding"]),
        kept=tokens * 9 * steps,
        in_forward=3 * residual,
        in_backward=2 * residual + (0 if by_rows else vocabulary),
        returns=False,
        copies=True,
    )
    for block in unit_specs(config)[1:-1]:
        yield from _block(config, batch, units, degree, block, direct=direct)
    head = "embedding" if config.tie_embeddings_and_output_weights else "head"
    chunk = min(tokens, LOSS_CHUNK_TOKENS) * rows
    gradient = 0 if direct else vocabulary
    yield _Part(
        name="head",
        unit=_largest(units[head]),
        kept=2 * residual + tokens * (4 + 20 * steps),
        in_forward=residual + chunk * (4 + size % 4),
        in_backward=2 * residual + max(chunk * (4 + size % 4), chunk * size + gradient),
    )


def _block(
    config: LlamaConfig,
    batch: MicroBatch,
    units: dict[str, list[UnitSize]],
    degree: int,
    spec: UnitSpec,
    *,
    direct: bool,
) -> Iterator[_Part]:
    tokens, size = batch.num_tokens, batch.compute_bytes
    residual = tokens * config.hidden_size * size
    columns = -(-config.ffn_hidden_size // (degree * len(units[f"{spec.name}.mlp"])))
    ffn = tokens * columns * size
    matrix = 0 if direct else columns * config.hidden_size * size
    recomputed = spec.recomputed_from is not None
    everything = block_activations(config, batch)
    mlp = residual + 2 * tokens * config.ffn_hidden_size * size
    norm = norm_backward(config, batch)
    in_backward = max(3 * residual + 3 * ffn + matrix, 2 * residual + norm + 2 * matrix)
    attention = everything - mlp
    # Both are recomputed together, from the block's input; the MLP's backward comes first.
    for part, keeps, input_bytes, found in (
        ("attention", attention, residual, attention - residual),
        ("mlp", mlp, 0, everything - residual),
    ):
        yield _Part(
            name=f"{spec.name}.{part}",
            unit=_largest(units[f"{spec.name}.{part}"]),
            kept=input_bytes if recomputed else keeps,
            recomputed=found if recomputed else 0,
            in_forward=2 * residual + max(residual, ffn) + (keeps if recomputed else 0),
            in_backward=in_backward,
            copies=recomputed,
        )
