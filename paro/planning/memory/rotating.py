"""Peak memory of a rank where weights rotate, from a walk through one step."""

# As in gathering.py, a walk through a step, here over the parts of planning/rotation.py. In
# addition to the model states it counts:
#
#   slices        those of the running part, as the note in rotation/rotating_unit.py lists them
#   activations   a block keeps as much as without slices, since those add up: attention keeps x, q,
#                 k, v and its output, the MLP its input, gate and up. The loss keeps its input and,
#                 per token and slice, a label's row and a log-sum-exp, but no gradients
#   transient     gradients of input and output, and the work with one slice: a partial output in
#                 addition to the sum, the MLP's gradients and one matrix gradient of a slice

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from model.config import LlamaConfig, loss_chunk_tokens
from paro.layout import chunk_numel
from paro.planning.cost_model import UnitSize, model_state_bytes
from paro.planning.memory.gathering import MemorySnapshot
from paro.planning.units import MicroBatch, block_activations, norm_backward
from paro.precision import BYTES_OF, PrecisionConfig
from paro.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A part in the walk: bytes that it keeps for backward, and its transient bytes."""

    name: str
    unit: UnitSize
    kept: int
    recomputed: int  # kept only from the recomputation to the end of its block's backward
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
        parts=tuple(_parts(config, batch, _by_part(units), strategy.params)),
    )
    return max(walk.moments(), key=lambda snapshot: snapshot.total)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Walk:
    strategy: Strategy
    units: tuple[UnitSize, ...]
    precision: PrecisionConfig
    in_place: bool
    parts: tuple[_Part, ...]

    def moments(self) -> Iterator[MemorySnapshot]:
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
        recomputed = 0
        for index in reversed(range(len(self.parts))):
            part = self.parts[index]
            if part.name.endswith(".mlp"):  # attention is recomputed before it
                recomputed = part.recomputed + self.parts[index - 1].recomputed
            yield MemorySnapshot(
                name=f"the backward of {part.name}",
                states=states,
                slices=self._backward_slices(part),
                activations=kept + recomputed,
                transient=part.in_backward,
            )
            kept -= part.kept
            recomputed -= min(recomputed, part.recomputed)
        yield MemorySnapshot(name="the update", states=states, transient=self._fp32_grads())

    def _forward_slices(self, part: _Part) -> int:
        slice_bytes = self._slice(part.unit.numel, self.precision.compute)
        if self.in_place:
            return self._room(slice_bytes) + (slice_bytes if part.copies else 0)
        return slice_bytes * (2 if part.copies and self.strategy.params > 2 else 1)

    def _backward_slices(self, part: _Part) -> int:
        weights = self._slice(part.unit.numel, self.precision.compute) if part.returns else 0
        grads = self._slice(part.unit.trainable_numel, self.precision.wire)
        if self.in_place:
            rooms = (self._room(weights), self._room(grads))
            alike = self.precision.compute == self.precision.wire
            return grads + (max(rooms) if alike else sum(rooms))
        return weights + 2 * grads

    def _slice(self, numel: int, kind: str) -> int:
        return numel // self.strategy.params * BYTES_OF[kind]

    def _room(self, slice_bytes: int) -> int:
        return 2 * chunk_numel(slice_bytes, 1)

    def _fp32_grads(self) -> int:
        """Bytes of the fp32 copy of a unit's gradients that the update reads."""
        if self.precision.accumulate == "fp32":
            return 0
        return max(unit.trainable_numel for unit in self.units) // self.strategy.optim * 4


def _by_part(units: Sequence[UnitSize]) -> dict[str, list[UnitSize]]:
    """The units of every part: one, or one for each half of its slices."""
    parts: dict[str, list[UnitSize]] = {}
    for unit in units:
        parts.setdefault(unit.name.partition(" ")[0], []).append(unit)
    return parts


def _largest(units: Sequence[UnitSize]) -> UnitSize:
    return max(units, key=lambda unit: unit.numel)


def _parts(
    config: LlamaConfig, batch: MicroBatch, units: dict[str, list[UnitSize]], degree: int
) -> Iterator[_Part]:
    tokens, size = batch.num_tokens, batch.compute_bytes
    residual = tokens * config.hidden_size * size
    steps = degree * len(units["embedding"])
    rows = -(-config.vocab_size // steps)
    vocabulary = rows * config.hidden_size * size
    yield _Part(
        name="embedding",
        unit=_largest(units["embedding"]),
        kept=tokens * 9 * steps,
        recomputed=0,
        in_forward=3 * residual,
        in_backward=2 * residual + vocabulary,
        returns=False,
        copies=True,
    )
    for layer in range(config.num_layers):
        yield from _block(config, batch, units, degree, layer)
    head = "embedding" if config.tie_embeddings_and_output_weights else "head"
    chunk = min(tokens, loss_chunk_tokens(batch.device_type)) * rows
    total = 0 if chunk == tokens * rows or size == 4 else 2 * vocabulary  # summed in fp32
    yield _Part(
        name="head",
        unit=_largest(units[head]),
        kept=2 * residual + tokens * (4 + 20 * steps),
        recomputed=0,
        in_forward=residual + chunk * (8 if size == 4 else 10),
        in_backward=2 * residual + max(chunk * (4 + size % 4), chunk * size + vocabulary + total),
    )


def _block(
    config: LlamaConfig,
    batch: MicroBatch,
    units: dict[str, list[UnitSize]],
    degree: int,
    layer: int,
) -> Iterator[_Part]:
    tokens, size = batch.num_tokens, batch.compute_bytes
    residual = tokens * config.hidden_size * size
    columns = -(-config.ffn_hidden_size // (degree * len(units[f"blocks.{layer}.mlp"])))
    ffn, matrix = tokens * columns * size, columns * config.hidden_size * size
    recompute = config.recompute
    recomputed = recompute is not None and recompute.first_layer(layer) is not None
    everything = block_activations(config, batch)
    mlp = residual + 2 * tokens * config.ffn_hidden_size * size
    norm = norm_backward(config, batch)
    in_backward = max(3 * residual + 3 * ffn + matrix, 2 * residual + norm + 2 * matrix)
    for part, keeps in (("attention", everything - mlp), ("mlp", mlp)):
        at_first = residual if part == "attention" else 0
        yield _Part(
            name=f"blocks.{layer}.{part}",
            unit=_largest(units[f"blocks.{layer}.{part}"]),
            kept=at_first if recomputed else keeps,
            recomputed=keeps - at_first if recomputed else 0,
            in_forward=2 * residual + max(residual, ffn) + (keeps if recomputed else 0),
            in_backward=in_backward,
            copies=recomputed,
        )
