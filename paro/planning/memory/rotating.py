"""What parts of a model keep, and what their slots take, where weights rotate."""

# An evaluation and a training step allocate slots (paro/step/rotating.py), and
#
#   activations   a block keeps as much as without slices, since those add up: attention keeps x, q,
#                 k, v and its output, the MLP its input, gate and up. The loss keeps its input and,
#                 per token and slice, a label's row and a log-sum-exp, but no gradients
#   transient     gradients of input and output, and the work with one slice: a partial output in
#                 addition to the sum, the MLP's gradients and one matrix gradient of a slice, if
#                 the matmul cannot write it into its buffer

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, lru_cache, partial

from model.config import LOSS_CHUNK_TOKENS, LlamaConfig
from paro.layout import chunk_numel
from paro.planning.rotation import unit_parts
from paro.planning.run_plan import MicroBatch
from paro.planning.units import (
    UnitActivations,
    block_activations,
    embedding_adds_rows,
    norm_backward,
)
from paro.step.rotating import Slot
from paro.step.rotation_plan import RotationShape


@lru_cache(maxsize=64)
def slot_bytes(numel: int, size: int, wire: int, device_type: str) -> Mapping[str | int, int]:
    """The bytes of the slots of a slice, with elements of `size` bytes, and `wire` as gradients."""
    found: dict[str | int, int] = {}
    for slots, scratch, of_element in (
        ((Slot.SPARE, Slot.SPARE_2), Slot.SCRATCH, size),
        ((Slot.GRAD, Slot.GRAD_2), Slot.GRAD_SCRATCH, wire),
    ):
        found |= dict.fromkeys(slots, numel * of_element)
        chunk = chunk_numel(numel, of_element, device_type=device_type)
        found[scratch] = 2 * chunk * of_element
    return found


def part_activations(
    config: LlamaConfig, batch: MicroBatch, shape: RotationShape, *, direct: bool
) -> Iterator[tuple[str, UnitActivations]]:
    """The parts by name, in forward order; `direct`: matmuls write gradients into their buffers."""
    residual = batch.tensor_bytes(config.hidden_size)
    mlp = residual + 2 * batch.tensor_bytes(config.ffn_hidden_size)
    needed = {"attention": block_activations(config, batch) - mlp, "mlp": mlp}
    begins = {group[0] for group in shape.recomputed}
    of_block = cache(partial(_of_block, config, batch, direct=direct))  # most are alike
    for index, (spec, part) in enumerate(unit_parts(config)):
        own = shape.parts[index]
        steps = shape.ring.num_steps * len(own.halves)
        if part.method == "look_up":
            found = _look_up(config, batch, steps, direct=direct)
        elif part.method == "loss":
            found = _loss(config, batch, steps, direct=direct)
        else:
            kept = (residual if index in begins else 0) if own.recomputed else None
            found = _keeping(of_block(steps), needed[part.method], kept)
        yield f"{spec.name}.{part.method}" if len(spec.parts) > 1 else spec.name, found


def _keeping(part: UnitActivations, needed: int, kept: int | None) -> UnitActivations:
    """With what its backward needs; if only some of it is `kept`, it is recomputed."""
    if kept is None:
        return replace(part, kept=needed)
    in_forward = part.in_forward + needed
    return replace(part, kept=kept, recomputed=needed - kept, in_forward=in_forward)


def _look_up(
    config: LlamaConfig, batch: MicroBatch, steps: int, *, direct: bool
) -> UnitActivations:
    residual = batch.tensor_bytes(config.hidden_size)
    by_rows = direct and embedding_adds_rows(batch)
    vocabulary = -(-config.vocab_size // steps) * config.hidden_size * batch.compute_bytes
    return UnitActivations(
        kept=batch.num_tokens * 9 * steps,
        in_forward=3 * residual,
        in_backward=2 * residual + (0 if by_rows else vocabulary),
    )


def _of_block(
    config: LlamaConfig, batch: MicroBatch, steps: int, *, direct: bool
) -> UnitActivations:
    residual = batch.tensor_bytes(config.hidden_size)
    columns = -(-config.ffn_hidden_size // steps)
    ffn = batch.tensor_bytes(columns)
    matrix = 0 if direct else columns * config.hidden_size * batch.compute_bytes
    norm = norm_backward(config, batch)
    return UnitActivations(
        kept=0,
        in_forward=2 * residual + max(residual, ffn),
        in_backward=max(3 * residual + 3 * ffn + matrix, 2 * residual + norm + 2 * matrix),
    )


def _loss(config: LlamaConfig, batch: MicroBatch, steps: int, *, direct: bool) -> UnitActivations:
    tokens, size = batch.num_tokens, batch.compute_bytes
    residual = batch.tensor_bytes(config.hidden_size)
    rows = -(-config.vocab_size // steps)
    chunk = min(tokens, LOSS_CHUNK_TOKENS) * rows
    gradient = 0 if direct else rows * config.hidden_size * size
    return UnitActivations(
        kept=2 * residual + tokens * (4 + 20 * steps),
        in_forward=residual + chunk * (4 + size % 4),
        in_backward=2 * residual + max(chunk * (4 + size % 4), chunk * size + gradient),
    )
