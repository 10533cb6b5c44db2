"""What parts of a model keep, and what their slots take, where weights rotate."""

# An evaluation and a training step allocate slots (paro/step/slices.py), and
#
#   activations   a block keeps as much as without slices, since those add up: attention keeps x, q,
#                 k, v and its output, the MLP its input, gate and up. The loss keeps its input and,
#                 per token and slice, a label's row and a log-sum-exp, but no gradients
#   transient     gradients of input and output, and the work with one slice: a partial output in
#                 addition to the sum, the MLP's gradients and one matrix gradient of a slice, if
#                 the matmul cannot write it into its buffer

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from model.config import loss_chunk
from paro.planning.activations import Activations, UnitActivations
from paro.planning.passes import StepCounts
from paro.spec.units import unit_parts


class PartActivations(Activations):
    """What the parts of a model keep and need in a micro-batch, in bytes."""

    def of_step(self, step: StepCounts) -> Iterator[tuple[str, UnitActivations]]:
        """Yield the parts by name, in forward order."""
        shape = step.shape
        mlp = self.residual + 2 * self.ffn
        needed = {"attention": self.of_block - mlp, "mlp": mlp}
        begins = {group[0] for group in shape.recomputed}
        for index, (spec, part) in enumerate(unit_parts(self.config)):
            steps = shape.num_slices * len(shape.halves(index))
            if part.method == "look_up":
                found = self._look_up(steps)
            elif part.method == "loss":
                found = self._loss(steps)
            else:
                found = self._in_block(steps, needed[part.method])
                if spec.recomputed_from is not None:
                    kept = self.residual if index in begins else 0
                    peak = found.in_forward + found.kept
                    found = replace(found, kept=kept, recomputed=found.kept - kept, in_forward=peak)
            yield f"{spec.name}.{part.method}" if len(spec.parts) > 1 else spec.name, found

    def _look_up(self, steps: int) -> UnitActivations:
        rows = -(-self.config.vocab_size // steps)
        vocabulary = rows * self.config.hidden_size * self.batch.compute_bytes
        return UnitActivations(
            kept=self.batch.num_tokens * 9 * steps,
            in_forward=3 * self.residual,
            in_backward=2 * self.residual + (0 if self.adds_rows else vocabulary),
        )

    def _in_block(self, steps: int, needed: int) -> UnitActivations:
        residual, columns = self.residual, -(-self.config.ffn_hidden_size // steps)
        ffn = self.batch.tensor_bytes(columns)
        size = 0 if self.direct else self.batch.compute_bytes
        matrix = columns * self.config.hidden_size * size
        before = 3 * residual + 3 * ffn + matrix
        return UnitActivations(
            kept=needed,
            in_forward=2 * residual + max(residual, ffn),
            in_backward=max(before, 2 * residual + self.norm_backward + 2 * matrix),
        )

    def _loss(self, steps: int) -> UnitActivations:
        residual, tokens, size = self.residual, self.batch.num_tokens, self.batch.compute_bytes
        rows = -(-self.config.vocab_size // steps)
        chunk = min(tokens, loss_chunk(rows, size, fused=False)) * rows
        gradient = 0 if self.direct else rows * self.config.hidden_size * size
        return UnitActivations(
            kept=2 * residual + tokens * (4 + 20 * steps),
            in_forward=residual + chunk * (4 + size % 4),
            in_backward=2 * residual + max(chunk * (4 + size % 4), chunk * size + gradient),
        )
