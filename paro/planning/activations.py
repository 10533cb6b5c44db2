"""The activations that each unit of a LLaMA keeps for backward, and needs to compute."""

# In: a model, a micro-batch and the shape of a step. Out: for every unit (the parameters that are
# gathered together; with rotated weights, attention and MLP of a block apart) the bytes saved from
# forward to backward, and the peaks of transient bytes in both (`UnitActivations`). Counted tensor
# by tensor: T tokens of a micro-batch, D hidden size, N query heads, K key and value heads, H head
# size, F feed-forward size. With FlashAttention, which does not save scores, a block saves
#
#     compute type   x, q, k, v, attention's output, x + attention, gate, up
#                                                             T * (2 D + (2 N + 2 K) H + 2 F)
#     fp32           log-sum-exp per token and query head
#
# where x is the previous unit's output, q and k are kept after RoPE, and normalized inputs and the
# product of gate and up are recomputed. With --qk-layernorm q and k are also kept before their
# norms, with an fp32 scale per head. Blocks recomputed as one checkpoint save a single input.
# Blocks with frozen parameters are counted as if all were trained, but below the first trained unit
# nothing is saved, and in the first block with adapters nothing before the first of them. Known to
# be too low: fp32 with grouped heads on CUDA, where no FlashAttention exists and scores are saved.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from model.config import LlamaConfig, loss_chunk, matmul_writes
from model.units import unit_specs
from paro.planning.context_parallel import kv_exchange_bytes
from paro.planning.step_counts import StepCounts
from paro.precision import BYTES_OF
from paro.spec.context_layout import head_exchange
from paro.spec.run_spec import RunSpec
from paro.spec.units import unit_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitActivations:
    """Activation bytes of a unit: saved for backward (`kept`), and peaks of transient bytes."""

    kept: int  # bytes saved from forward to the end of the unit's backward
    recomputed: int = 0  # bytes that exist from recomputation to the end of the unit's backward
    in_forward: int  # peak of transient bytes in forward
    before_gradients: int = 0  # peak of transient bytes in backward before the first gradient
    in_backward: int  # peak of transient bytes in backward from the unit's first gradient on
    in_loss: int = 0  # peak of transient bytes of a chunked loss that makes gradients in forward
    kept_to_the_end: int = 0  # the part of `kept` that is freed only when all of backward ends
    casts: int = 0  # bytes of cached fp8 weights, which stay as long as the weights do not change


class Activations:
    """The activation bytes of a model's units in a micro-batch: saved, and transient."""

    def __init__(self, run: RunSpec) -> None:
        """Compute shared sizes."""
        self.run, self.config = run, run.config
        config, precision = self.config, run.precision
        dtype = precision.wire if run.strategy.grads > 1 else precision.accumulate
        self.grad_bytes = BYTES_OF[dtype]  # bytes of an element of gradient buffers
        self.residual = run.tensor_bytes(config.hidden_size)  # bytes of a block's input
        self.ffn = run.tensor_bytes(config.ffn_hidden_size)  # bytes of gate, of up
        # Bytes of weights in the compute type: one matrix of the MLP; embedding or output layer.
        self._matrix = config.hidden_size * config.ffn_hidden_size * run.compute_bytes
        self._vocabulary = config.vocab_size * config.hidden_size * run.compute_bytes
        # Whether matmuls write weights' gradients directly into their buffers, without a copy; the
        # embedding adds its rows there likewise.
        self.direct = matmul_writes(self.grad_bytes, run.compute_bytes, run.device_type)
        self.adds_rows = self.direct and run.device_type == "cpu" and run.compute_bytes == 4
        # Backward of a norm and the linear layers after it has the gradients of the block's
        # output, of the normalized input and of the input, and the normalized input. On a CPU,
        # below fp32, the norm uses two fp32 tensors instead of the normalized input.
        self.norm_backward = 4 * self.residual
        if run.device_type == "cpu" and run.compute_bytes < 4:
            self.norm_backward += 2 * self.residual * 4 // run.compute_bytes - self.residual

    def of_step(self, step: StepCounts) -> Iterator[tuple[str, UnitActivations]]:
        """Yield the name and the activations of every unit, in forward order."""
        specs = unit_specs(self.config)
        begins = {index: group[0] for group in step.shape.recomputed for index in group}
        yield specs[0].name, self._of_embedding()
        for index, spec in enumerate(specs[1:-1], start=1):
            # Blocks below the first trained unit save nothing, as recomputed ones.
            yield spec.name, self._of_block(index, begins.get(index, spec.recomputed_from))
        yield specs[-1].name, self._of_head()

    def _of_embedding(self) -> UnitActivations:
        tied = self.config.tie_embeddings_and_output_weights
        by_rows = self.adds_rows and not tied
        return UnitActivations(
            kept=self.run.num_tokens * 8,  # token ids are int64
            in_forward=0,
            before_gradients=self.residual + (0 if by_rows else self._vocabulary),
            # A tied embedding adds its gradient to the head's, which is allocated already.
            in_backward=0 if tied else self.residual if by_rows else self._vocabulary,
        )

    # Blocks #

    def _of_block(self, index: int, recomputed_from: int | None) -> UnitActivations:
        config, whole = self.config, self.of_block
        unkept = self._before_adapters() if index == 1 else 0
        if recomputed_from is None:
            return UnitActivations(kept=whole - unkept, **self._transients)
        kept = self.residual if index == recomputed_from else 0
        if config.keeps_core:
            width = config.kv_channels * self.run.compute_bytes
            kept += self.run.num_tokens * config.num_attention_heads * (width + 4)
        recomputed = whole - max(kept, unkept)
        activations = UnitActivations(kept=kept, recomputed=recomputed, **self._transients)
        return replace(activations, in_forward=activations.in_forward + recomputed)

    @cached_property
    def _transients(self) -> dict[str, int]:
        """The peaks of a block's transient bytes, by field of `UnitActivations`."""
        config, run, residual, ffn = self.config, self.run, self.residual, self.ffn
        # Backward peaks at the start of the MLP, with the gradients of w_down, of gate and up and
        # of the product of both. Gate and up are then freed, which makes room for the gradients
        # of w_gate and w_up.
        peaks = {
            "in_forward": residual + max(residual, ffn),
            "before_gradients": residual + 3 * ffn + self._matrix + self._of_adapters(),
            "in_backward": max(residual + self._matrix, self.norm_backward + 2 * self._matrix),
        }
        if config.torch_compile is not None:
            peaks |= self._compiled_backward()
        elif config.fp8_format is not None:
            peaks |= self._fp8_transients(peaks)
        elif config.lora is None and self.direct:
            peaks["before_gradients"] = residual + 2 * ffn
            peaks["in_backward"] = max(residual + 3 * ffn, self.norm_backward)
        if config.keeps_scores:  # forward has scores and mask, backward the scores' gradients
            scores = 8 * run.num_tokens * config.num_attention_heads * run.seq_length
            for field in ("in_forward", "in_backward"):
                peaks[field] = max(peaks[field], residual + scores)
        if run.context.ring > 1:
            # The MLP's backward is over, so its input, gate and up are free.
            peaks["in_backward"] = max(peaks["in_backward"], kv_exchange_bytes(run) - 2 * ffn)
        return peaks

    def _fp8_transients(self, without: Mapping[str, int]) -> dict[str, int]:
        """Compute the transients where operands are cast to fp8, weights at every use.

        Backward makes two fp8 casts of a gradient, one transposed, and transposes the saved inputs
        of linear layers. A weight's gradient is a product, which is copied or added to its buffer.
        """
        config, run, residual = self.config, self.run, self.residual
        size, on_gpu, norm = run.compute_bytes, run.device_type == "cuda", self.norm_backward
        narrow = run.num_tokens * config.hidden_size  # elements, which are bytes in fp8
        wide = run.num_tokens * config.ffn_hidden_size
        weight = config.hidden_size * config.ffn_hidden_size
        # Bytes per element at most: Triton makes only the result, torch also fp32 tensors.
        cast = 1 if on_gpu or config.fuses_fp8_casts else 8 if size < 4 else 5
        casting = max(cast * wide + weight, residual + wide + weight, cast * weight)
        in_forward = max(size * wide + casting, 2 * residual)
        # Rows, or columns, of all weight matrices of a block together.
        width = 2 * sum(_attention_widths(config)) + 3 * config.ffn_hidden_size
        peaks = {"in_forward": in_forward, "casts": 2 * config.hidden_size * width}
        if config.lora is not None:
            return peaks | {
                "before_gradients": without["before_gradients"] + narrow,
                "in_backward": without["in_backward"] + 2 * wide,
            }
        # Triton makes the gradients of gate and up and the product of gate and up at once.
        others = residual + 2 * narrow + (3 if on_gpu else 2) * size * wide
        before = max(others + cast * wide, residual + 2 * narrow + size * wide + cast * weight)
        product = others + wide + size * weight
        inputs = max(
            residual + 2 * narrow + 3 * size * wide,
            norm + 4 * wide,
            4 * residual + narrow + 4 * wide + cast * weight,
        )
        if not (self.direct or on_gpu or size == 4):  # a CPU converts the product to add it
            product += 4 * weight
        return peaks | {"before_gradients": before, "in_backward": max(product, inputs)}

    def _compiled_backward(self) -> dict[str, int]:
        """Compute the peak bytes of a compiled block's backward, which is reached in the MLP.

        Gate and up, which are counted as saved, are freed before the first gradient of a weight.
        """
        residual, ffn, weight = self.residual, self.ffn, self._matrix
        before, after = residual + 4 * ffn, 5 * residual
        if self.config.fp8_format is None:
            if not self.direct:
                before, after = max(before, residual + ffn + weight), after + weight
            return {"before_gradients": before, "in_backward": after}
        # The weights' gradients arrive together, after the compiled graph.
        output = self.config.hidden_size * _attention_widths(self.config)[0]
        together = 3 * weight + output * self.run.compute_bytes + residual - 2 * ffn
        return {"before_gradients": max(before, together), "in_backward": max(after, together)}

    def _of_adapters(self) -> int:
        """Compute the peak bytes of adapters, and their dropout's mask, in the MLP's backward."""
        lora, size = self.config.lora, self.run.compute_bytes
        if lora is None or "w_down" not in lora.targets:
            return 0
        products = self.config.ffn_hidden_size * (2 * size + (1 if lora.dropout else 0))
        # The frozen weight has no gradient.
        return self.run.num_tokens * (products + lora.rank * size) - self._matrix

    def _before_adapters(self) -> int:
        """Count bytes before the adapters of the first block that has some, which saves none."""
        lora = self.config.lora
        targets = {*lora.targets} if lora is not None else set()
        if not targets or targets & {"wq", "wk", "wv"}:
            return 0
        query, key = _attention_widths(self.config)
        width = self.config.hidden_size + query + 2 * key
        if "wo" not in targets:
            width += query
            if targets == {"w_down"}:
                width += self.config.hidden_size
        return self._with_scores(width)

    @cached_property
    def of_block(self) -> int:
        """The bytes that backward of a block reads, except those of a recomputed core attention."""
        config = self.config
        query, key = _attention_widths(config)
        width = 2 * config.hidden_size + 2 * query + 2 * key + 2 * config.ffn_hidden_size
        # A compiled graph saves attention's output once more, as input of the next matmul.
        in_fp8 = query if config.torch_compile is not None and config.fp8_format is not None else 0
        return self._with_scores(width) + self.run.num_tokens * in_fp8

    def _with_scores(self, width: int) -> int:
        """Count bytes of `width` elements per token, and bytes saved by attention and norms."""
        config, run = self.config, self.run
        without_core = config.recompute is not None and config.recompute.core_attention
        in_fp32 = 0 if without_core else config.num_attention_heads  # log-sum-exp
        query, key = _attention_widths(config)
        if config.keeps_scores and not without_core:
            # Instead of queries, keys and values: an fp32 copy of each for every query head.
            width -= query + 2 * key
            in_fp32 = 3 * query + config.num_attention_heads * run.seq_length
        if run.context.heads > 1 and not without_core:
            # Queries, keys and values as exchanged, and the output before and after.
            num_heads = config.num_attention_heads, config.num_query_groups
            repeats = head_exchange(*num_heads, run.context).repeats
            width += query + 2 * (repeats - 1) * key
        if config.qk_layernorm:
            width += query + key
            in_fp32 += config.num_attention_heads + config.num_query_groups
        return run.num_tokens * (width * run.compute_bytes + 4 * in_fp32)

    # The head #

    def _of_head(self) -> UnitActivations:
        # The head saves its input, an fp32 scale per token and, since the loss computes gradients
        # in forward, the gradient of the normalized input.
        residual, tied = self.residual, self.config.tie_embeddings_and_output_weights
        # A tied weight's gradient stays until the embedding's gradient exists.
        weight = self._vocabulary if tied else 0
        before, _ = self._chunk_of_loss()
        return UnitActivations(
            kept=self.run.num_tokens * 4 + 2 * residual + weight,
            in_forward=residual + (self._tied_loss() if tied else before),
            in_loss=0 if tied else residual + self._summed_loss(self.grad_bytes),
            before_gradients=residual,
            in_backward=residual,
            kept_to_the_end=weight,
        )

    def _chunk_of_loss(self) -> tuple[int, int]:
        """Compute peak bytes of a chunk of tokens: to the logits' gradient; for the weight's.

        The fp32 logits become probabilities, then their gradient, in place. Below fp32 a CPU has
        two more tensors in the compute type: the logits, and their gradient. On a GPU Triton
        overwrites the logits by the gradient. Masked inputs, and masked inputs times the tokens'
        weights, come on top.
        """
        size, vocab_size = self.run.compute_bytes, self.config.vocab_size
        chunk = self.run.loss_chunk
        in_place = size == 4 or self.run.fuses_loss
        logits = chunk * vocab_size * (size if in_place else 4 + size)
        inputs = chunk * self.config.hidden_size * size
        return logits + inputs, chunk * vocab_size * size + 2 * inputs

    def _summed_loss(self, grad_bytes: int) -> int:
        """Compute peak bytes of the loss where the output weight's gradient is summed over chunks.

        The gradient's buffer, with `grad_bytes` per element, is not counted. Counted are the sum,
        unless the buffer has it, and one chunk's product, which a CPU converts before adding it,
        unless matmuls write into the buffer or the sum.
        """
        (before, after), run = self._chunk_of_loss(), self.run
        numel = self.config.vocab_size * self.config.hidden_size
        sums = run.num_tokens > run.loss_chunk and grad_bytes < 4
        if not matmul_writes(4 if sums else grad_bytes, run.compute_bytes, run.device_type):
            after += numel * (run.compute_bytes + (4 if run.device_type == "cpu" else 0))
        return (4 * numel if sums else 0) + max(before, after)

    def _tied_loss(self) -> int:
        """Compute the peak bytes of a tied weight's loss without the gradients that stay."""
        before, after = self._chunk_of_loss()
        if self.run.num_tokens <= self.run.loss_chunk:
            return max(before - self._vocabulary, after)  # the weight's gradient comes last
        if self.run.compute_bytes == 4:
            return max(before, after)
        # Several chunks: the weight's gradient is summed in fp32, and stays as a two-byte copy.
        return self._summed_loss(2) - self._vocabulary


class PartActivations(Activations):
    """The activation bytes of a model's parts in a micro-batch where weights rotate.

    A block saves as much for all slices together as without slices. Transient are the work with
    one slice and the gradients of input and output. Slots are not counted (paro/step/slices.py).
    """

    def of_step(self, step: StepCounts) -> Iterator[tuple[str, UnitActivations]]:
        """Yield the name and the activations of every part, in forward order."""
        shape = step.shape
        mlp = self.residual + 2 * self.ffn
        in_block = {"attention": self.of_block - mlp, "mlp": mlp}
        begins = {group[0] for group in shape.recomputed}
        for index, (spec, part) in enumerate(unit_parts(self.config)):
            steps = shape.num_slices * len(shape.halves(index))
            if part.method == "look_up":
                activations = self._look_up(steps)
            elif part.method == "loss":
                activations = self._loss(steps)
            else:
                activations = self._in_block(steps, in_block[part.method])
                if spec.recomputed_from is not None:
                    kept = self.residual if index in begins else 0
                    peak = activations.in_forward + activations.kept
                    activations = replace(
                        activations, kept=kept, recomputed=activations.kept - kept, in_forward=peak
                    )
            yield f"{spec.name}.{part.method}" if len(spec.parts) > 1 else spec.name, activations

    def _look_up(self, steps: int) -> UnitActivations:
        rows = -(-self.config.vocab_size // steps)
        vocabulary = rows * self.config.hidden_size * self.run.compute_bytes
        return UnitActivations(
            kept=self.run.num_tokens * 9 * steps,
            in_forward=3 * self.residual,
            in_backward=2 * self.residual + (0 if self.adds_rows else vocabulary),
        )

    def _in_block(self, steps: int, needed: int) -> UnitActivations:
        residual, columns = self.residual, -(-self.config.ffn_hidden_size // steps)
        ffn = self.run.tensor_bytes(columns)
        size = 0 if self.direct else self.run.compute_bytes
        matrix = columns * self.config.hidden_size * size
        before = 3 * residual + 3 * ffn + matrix
        return UnitActivations(
            kept=needed,
            in_forward=2 * residual + max(residual, ffn),
            in_backward=max(before, 2 * residual + self.norm_backward + 2 * matrix),
        )

    def _loss(self, steps: int) -> UnitActivations:
        residual, tokens, size = self.residual, self.run.num_tokens, self.run.compute_bytes
        rows = -(-self.config.vocab_size // steps)
        chunk = min(tokens, loss_chunk(rows, size, fused=False)) * rows
        gradient = 0 if self.direct else rows * self.config.hidden_size * size
        return UnitActivations(
            kept=2 * residual + tokens * (4 + 20 * steps),
            in_forward=residual + chunk * (4 + size % 4),
            in_backward=2 * residual + max(chunk * (4 + size % 4), chunk * size + gradient),
        )


def _attention_widths(config: LlamaConfig) -> tuple[int, int]:
    """Count elements per token of all query heads, and of all key heads."""
    query = config.num_attention_heads * config.kv_channels
    return query, config.num_query_groups * config.kv_channels
