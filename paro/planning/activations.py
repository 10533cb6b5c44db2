"""The activations that each unit of a LLaMA keeps for backward, and needs to compute."""

# Letters as in model/llama.py, T = B * S tokens of a micro-batch. A block keeps for backward
#
#     compute type   x, q, k, v, attention's output, x + attention, gate, up
#                                                             T * (2 D + (2 N + 2 K) H + 2 F)
#     fp32           log-sum-exp per token and query head
#
# where x is the previous unit's output. q and k are kept after RoPE; attention and the output
# projection share the attention's output; normalized inputs and the product of gate and up are
# recomputed. With --qk-layernorm q and k are also kept before their norms, with one fp32 scale per
# head. This holds for attention kernels that do not keep the scores (flash). CUDA has none for fp32
# with grouped heads: there all scores are kept, which is not counted here.
#
# The head keeps its input, an fp32 scale per token and, since the loss computes gradients in
# forward, that of its normalized input. The gradient of the output weight is written into its
# buffer, or kept, if the weight is tied: it has two gradients then. A fully recomputed block
# keeps only its input, blocks recomputed together keep one input, and each with
# --paro-recompute-keep attention's output and log-sum-exp; recomputing core attention saves the
# log-sum-exp. Where ranks exchange tokens for heads, attention keeps queries, keys and values
# as exchanged, keys and values maybe repeated, and its output before and after it is sent back.
# Blocks with frozen parameters are counted as if all were trained; below the first trained unit
# nothing is kept, and in the first block with adapters nothing before the first of them. Adapters
# keep nothing. In forward, what those of gate and up add is there as well as what the weights make;
# in backward, that of w_down computes the product of gate and up again, and gradients of both
# before those of the weight's own product exist.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from model.config import LlamaConfig
from model.units import unit_specs
from paro.planning.context_parallel import kv_exchange_bytes
from paro.planning.passes import StepCounts
from paro.spec.run_spec import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitActivations:
    """Activation bytes of a unit; the transients are its peaks in addition to `kept`."""

    kept: int  # from forward to the end of the unit's backward
    recomputed: int = 0  # from recomputation to the end of the unit's backward
    in_forward: int
    before_gradients: int = 0  # in backward, until the unit's first gradient exists
    in_backward: int  # after that
    in_loss: int = 0  # in forward, from the unit's first gradient on, if it makes any
    kept_to_the_end: int = 0  # part of `kept`: until the end of the whole backward
    casts: int = 0  # of its weights in fp8, while their values stay


@dataclass(frozen=True, kw_only=True)
class Activations:
    """What a model's units keep and need in a micro-batch, in bytes."""

    config: LlamaConfig
    batch: MicroBatch
    grad_bytes: int  # of an element of the buffers for a micro-batch's gradients

    @cached_property
    def residual(self) -> int:
        """A block's input."""
        return self.batch.tensor_bytes(self.config.hidden_size)

    @cached_property
    def ffn(self) -> int:
        """An MLP's inner tensor."""
        return self.batch.tensor_bytes(self.config.ffn_hidden_size)

    @cached_property
    def _weight(self) -> int:
        """A matrix of an MLP, in the compute type."""
        return self.config.hidden_size * self.config.ffn_hidden_size * self.batch.compute_bytes

    @cached_property
    def _of_vocabulary(self) -> int:
        """The same of the embedding, and of the output layer."""
        return self.config.vocab_size * self.config.hidden_size * self.batch.compute_bytes

    @cached_property
    def direct(self) -> bool:
        """Whether matmuls write gradients into their buffers, without a copy."""
        return self._matmuls_write(self.grad_bytes)

    def _matmuls_write(self, grad_bytes: int) -> bool:
        in_fp32 = grad_bytes == 4 and self.batch.device_type == "cuda"
        return in_fp32 or grad_bytes == self.batch.compute_bytes

    @property
    def adds_rows(self) -> bool:
        """Whether the embedding's gradient is added to buffers of its own type row by row."""
        return self.direct and self.batch.device_type == "cpu" and self.batch.compute_bytes == 4

    @cached_property
    def norm_backward(self) -> int:
        """For the backward of a norm and the linear layers after it, without their weights.

        These are the gradients of the block's output, of the normalized input and of the input, and
        the normalized input; on a CPU, below fp32, the norm uses two fp32 tensors instead of that.
        """
        if self.batch.device_type == "cpu" and self.batch.compute_bytes < 4:
            return 3 * self.residual + 2 * self.residual * 4 // self.batch.compute_bytes
        return 4 * self.residual

    def of_step(self, step: StepCounts) -> Iterator[tuple[str, UnitActivations]]:
        """Yield the units by name, in forward order."""
        specs = unit_specs(self.config)
        begins = {index: group[0] for group in step.shape.recomputed for index in group}
        yield specs[0].name, self._of_embedding()
        for index, spec in enumerate(specs[1:-1], start=1):
            # Those below the first trained unit are counted as if they were recomputed too.
            yield spec.name, self._of_block(index, begins.get(index, spec.recomputed_from))
        yield specs[-1].name, self._of_head()

    def _of_embedding(self) -> UnitActivations:
        tied = self.config.tie_embeddings_and_output_weights
        by_rows = self.adds_rows and not tied
        return UnitActivations(
            kept=self.batch.num_tokens * 8,  # token ids
            in_forward=0,
            before_gradients=self.residual + (0 if by_rows else self._of_vocabulary),
            # Tied: added to the head's, which is kept until then.
            in_backward=0 if tied else self.residual if by_rows else self._of_vocabulary,
        )

    # Blocks #

    def _of_block(self, index: int, recomputed_from: int | None) -> UnitActivations:
        config, needed = self.config, self.of_block
        unkept = self._before_adapters() if index == 1 else 0
        if recomputed_from is None:
            return UnitActivations(kept=needed - unkept, **self._transients)
        kept = self.residual if index == recomputed_from else 0
        if config.keeps_core:
            width = config.kv_channels * self.batch.compute_bytes
            kept += self.batch.num_tokens * config.num_attention_heads * (width + 4)
        recomputed = needed - max(kept, unkept)
        found = UnitActivations(kept=kept, recomputed=recomputed, **self._transients)
        return replace(found, in_forward=found.in_forward + recomputed)

    @cached_property
    def _transients(self) -> dict[str, int]:
        """Peak bytes of a block's forward and backward in addition to those it keeps, by field."""
        config, batch, residual, ffn = self.config, self.batch, self.residual, self.ffn
        # Backward peaks at the start of the MLP: the gradients of w_down, of gate and up and of
        # their product. Gate and up are then freed, which makes room for the gradients of their
        # producers.
        found = {
            "in_forward": residual + max(residual, ffn),
            "before_gradients": residual + 3 * ffn + self._weight + self._of_adapters(),
            "in_backward": max(residual + self._weight, self.norm_backward + 2 * self._weight),
        }
        if config.torch_compile is not None:
            found |= self._compiled_backward()
        elif config.fp8_format is not None:
            found |= self._fp8_transients(found)
        elif config.lora is None and self.direct:
            found["before_gradients"] = residual + 2 * ffn
            found["in_backward"] = max(residual + 3 * ffn, self.norm_backward)
        if config.keeps_scores:  # they and their mask, then their gradients
            scores = 8 * batch.num_tokens * config.num_attention_heads * batch.seq_length
            for field in ("in_forward", "in_backward"):
                found[field] = max(found[field], residual + scores)
        if batch.context.ring > 1:
            # The block's input to the MLP is free by then, as are gate and up.
            exchanging = kv_exchange_bytes(config, batch) - 2 * ffn
            found["in_backward"] = max(found["in_backward"], exchanging)
        if config.lora is not None:
            found["in_forward"] += ffn * len({"w_gate", "w_up"} & {*config.lora.targets})
        return found

    def _fp8_transients(self, without: Mapping[str, int]) -> dict[str, int]:
        """Return the same where operands are cast; weights are counted as cast at every use.

        Backward casts a gradient as it is and transposed, and transposes the inputs of weights,
        whose gradients are products that are then copied or added to their buffers.
        """
        config, batch, residual = self.config, self.batch, self.residual
        size, on_gpu, norm = batch.compute_bytes, batch.device_type == "cuda", self.norm_backward
        narrow = batch.num_tokens * config.hidden_size  # elements, which are bytes in fp8
        wide = batch.num_tokens * config.ffn_hidden_size
        weight = config.hidden_size * config.ffn_hidden_size
        # At most, of an element: the result by Triton, and in fp32 by torch's operations.
        cast = 1 if on_gpu or config.fuses_fp8_casts else 8 if size < 4 else 5
        casting = max(cast * wide + weight, residual + wide + weight, cast * weight)
        in_forward = max(size * wide + casting, 2 * residual)
        width = 2 * sum(_attention_widths(config)) + 3 * config.ffn_hidden_size  # of all weights
        found = {"in_forward": in_forward, "casts": 2 * config.hidden_size * width}
        if config.lora is not None:
            return found | {
                "before_gradients": without["before_gradients"] + narrow,
                "in_backward": without["in_backward"] + 2 * wide,
            }
        # Triton makes gate's and up's gradients and their product at once.
        inputs = residual + 2 * narrow + (3 if on_gpu else 2) * size * wide
        before = max(inputs + cast * wide, residual + 2 * narrow + size * wide + cast * weight)
        product = inputs + wide + size * weight
        inputs = max(
            residual + 2 * narrow + 3 * size * wide,
            norm + 4 * wide,
            4 * residual + narrow + 4 * wide + cast * weight,
        )
        if not (self.direct or on_gpu or size == 4):  # to add it, a CPU converts the product
            product += 4 * weight
        return found | {"before_gradients": before, "in_backward": max(product, inputs)}

    def _compiled_backward(self) -> dict[str, int]:
        """Return the peak bytes of a compiled block's backward, which is at its most in the MLP.

        Gate and up, which are counted as kept, are freed before the first gradient of a weight.
        """
        residual, ffn, weight = self.residual, self.ffn, self._weight
        before, after = residual + 4 * ffn, 5 * residual
        if self.config.fp8_format is None:
            if not self.direct:
                before, after = max(before, residual + ffn + weight), after + weight
            return {"before_gradients": before, "in_backward": after}
        # Its products arrive together, after the graph.
        output = self.config.hidden_size * _attention_widths(self.config)[0]
        together = 3 * weight + output * self.batch.compute_bytes + residual - 2 * ffn
        return {"before_gradients": max(before, together), "in_backward": max(after, together)}

    def _of_adapters(self) -> int:
        """Return the peak bytes of a block's adapters, and of their dropout's mask, in the MLP's
        backward."""
        lora, size = self.config.lora, self.batch.compute_bytes
        if lora is None or "w_down" not in lora.targets:
            return 0
        products = self.config.ffn_hidden_size * (2 * size + (1 if lora.dropout else 0))
        # No gradient of the frozen weight is made.
        return self.batch.num_tokens * (products + lora.rank * size) - self._weight

    def _before_adapters(self) -> int:
        """What the first block with adapters does not keep, since nothing before them trains."""
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
        """What a block needs for backward, but for core attention's if that is recomputed."""
        config = self.config
        query, key = _attention_widths(config)
        width = 2 * config.hidden_size + 2 * query + 2 * key + 2 * config.ffn_hidden_size
        # A compiled graph keeps attention's output once more, as the next matmul reads it.
        in_fp8 = query if config.torch_compile is not None and config.fp8_format is not None else 0
        return self._with_scores(width) + self.batch.num_tokens * in_fp8

    def _with_scores(self, width: int) -> int:
        """Of `width` elements per token, and of what attention and its norms save in addition."""
        config, batch = self.config, self.batch
        without_core = config.recompute is not None and config.recompute.core_attention
        in_fp32 = 0 if without_core else config.num_attention_heads  # log-sum-exp
        query, key = _attention_widths(config)
        if config.keeps_scores and not without_core:
            # Instead of queries, keys and values: an fp32 copy of each for every query head.
            width -= query + 2 * key
            in_fp32 = 3 * query + config.num_attention_heads * batch.seq_length
        if batch.context.heads > 1 and not without_core:
            repeats = max(1, batch.context.heads // config.num_query_groups)
            width += query + 2 * (repeats - 1) * key
        if config.qk_layernorm:
            width += query + key
            in_fp32 += config.num_attention_heads + config.num_query_groups
        return batch.num_tokens * (width * batch.compute_bytes + 4 * in_fp32)

    # The head #

    def _of_head(self) -> UnitActivations:
        residual, tied = self.residual, self.config.tie_embeddings_and_output_weights
        # A tied weight's gradient is kept until the embedding's gradient exists.
        weight = self._of_vocabulary if tied else 0
        before, _ = self._chunk_of_loss()
        return UnitActivations(
            kept=self.batch.num_tokens * 4 + 2 * residual + weight,
            in_forward=residual + (self._tied_loss() if tied else before),
            in_loss=0 if tied else residual + self._summed_loss(self.grad_bytes),
            before_gradients=residual,
            in_backward=residual,
            kept_to_the_end=weight,
        )

    def _chunk_of_loss(self) -> tuple[int, int]:
        """Return peak bytes of a chunk of tokens: up to its logits' gradient, and for the weight's.

        The fp32 logits become probabilities and their gradient in place. Below fp32 the product
        before them, and the gradient after them, are tensors of their own on a CPU; on a GPU Triton
        replaces the product by the gradient. Masked inputs, and these times the tokens' weights,
        are others.
        """
        size, vocab_size = self.batch.compute_bytes, self.config.vocab_size
        chunk = min(self.batch.num_tokens, self.batch.loss_chunk(self.config))
        in_place = size == 4 or self.batch.fuses_loss(self.config)
        logits = chunk * vocab_size * (size if in_place else 4 + size)
        inputs = chunk * self.config.hidden_size * size
        return logits + inputs, chunk * vocab_size * size + 2 * inputs

    def _summed_loss(self, grad_bytes: int) -> int:
        """Return peak bytes of the loss where the output weight's gradient is summed over chunks.

        In addition to the buffer, with elements of `grad_bytes`: the sum, if it is not summed
        there, and one chunk's product, which a CPU converts before adding it, unless matmuls write
        into the buffer, or into the sum.
        """
        before, after = self._chunk_of_loss()
        numel = self.config.vocab_size * self.config.hidden_size
        on_cpu = self.batch.device_type == "cpu"
        sums = self.batch.num_tokens > self.batch.loss_chunk(self.config) and grad_bytes < 4
        if not self._matmuls_write(4 if sums else grad_bytes):
            after += numel * (self.batch.compute_bytes + (4 if on_cpu else 0))
        return (4 * numel if sums else 0) + max(before, after)

    def _tied_loss(self) -> int:
        """Return the peak bytes of the loss in addition to the gradients that it keeps."""
        before, after = self._chunk_of_loss()
        if self.batch.num_tokens <= self.batch.loss_chunk(self.config):
            return max(before - self._of_vocabulary, after)  # the weight's is computed last
        if self.batch.compute_bytes == 4:
            return max(before, after)
        # Several chunks: the weight's gradient is summed in fp32, and kept as a two-byte copy.
        return self._summed_loss(2) - self._of_vocabulary


def _attention_widths(config: LlamaConfig) -> tuple[int, int]:
    """Return elements per token of all query heads, and of all key heads."""
    query = config.num_attention_heads * config.kv_channels
    return query, config.num_query_groups * config.kv_channels
