"""Sizes of LLaMA's units, and the activations that each keeps for backward."""

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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from model.config import LOSS_CHUNK_TOKENS, LlamaConfig
from model.units import recomputed_groups, unit_specs
from paro.planning.context_parallel import travelling_bytes
from paro.planning.cost_model import UnitSize, first_trained, size_units
from paro.planning.rotation import rotating_units_of
from paro.planning.run_plan import MicroBatch
from paro.step.actions import StepShape, number_buffers


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


def units_of(
    config: LlamaConfig,
    *,
    world_size: int,
    is_trained: Callable[[str], bool] = lambda _name: True,
    rotated_over: int = 1,
    in_place: bool = False,
) -> tuple[UnitSize, ...]:
    """The model's units, sharded over `world_size` ranks: embedding, blocks and head.

    Where weights rotate, over 2 or more ranks, a block is two units, or three `in_place`, and all
    norms form one more unit.
    """
    if rotated_over > 1:
        return rotating_units_of(
            config, rotated_over, world_size=world_size, is_trained=is_trained, in_place=in_place
        )
    return size_units(unit_specs(config), world_size=world_size, is_trained=is_trained)


def shape_of(
    config: LlamaConfig,
    units: Sequence[UnitSize],
    *,
    gathers: bool,
    reduces: bool,
    prefetch_units: int,
) -> StepShape:
    """What the actions of a step with these units depend on, where parameters are not rotated."""
    early = {len(units) - 1} if loss_writes_gradients(config, units) else ()
    return StepShape(
        units=number_buffers([unit.kind for unit in units]),
        gathers=gathers,
        reduces=reduces,
        prefetch_units=prefetch_units,
        recomputed=recomputed_groups(unit_specs(config), first_trained(units)),
        grads_in_forward=frozenset(early),
    )


def loss_writes_gradients(config: LlamaConfig, units: Sequence[UnitSize]) -> bool:
    """Whether the head writes gradients of its parameters in forward, where these are gathered."""
    return bool(units[-1].trainable_numel) and not config.tie_embeddings_and_output_weights


def activations_of(
    config: LlamaConfig, batch: MicroBatch, units: Sequence[UnitSize], *, grad_bytes: int
) -> tuple[UnitActivations, ...]:
    """Activations of each of the units, which `units_of` made.

    `grad_bytes` are those of an element of the buffers for a micro-batch's gradients.
    """
    direct = matmuls_write(grad_bytes, batch)
    specs = unit_specs(config)
    groups = recomputed_groups(specs, first_trained(units))
    begins = {index: group[0] for group in groups for index in group}
    blocks = (
        # Those below the first trained unit are counted as if they were recomputed too.
        _block(config, batch, index, begins.get(index, spec.recomputed_from), direct=direct)
        for index, spec in enumerate(specs[1:-1], start=1)
    )
    ends = _embedding(config, batch, direct=direct), _head(config, batch, grad_bytes)
    return (ends[0], *blocks, ends[1])


def _embedding(config: LlamaConfig, batch: MicroBatch, *, direct: bool) -> UnitActivations:
    residual = batch.tensor_bytes(config.hidden_size)
    gradient = config.vocab_size * config.hidden_size * batch.compute_bytes
    tied = config.tie_embeddings_and_output_weights
    by_rows = direct and embedding_adds_rows(batch) and not tied
    return UnitActivations(
        kept=batch.num_tokens * 8,  # token ids
        in_forward=0,
        before_gradients=residual + (0 if by_rows else gradient),
        # Tied: added to the head's, which is kept until then.
        in_backward=0 if tied else residual if by_rows else gradient,
    )


def embedding_adds_rows(batch: MicroBatch) -> bool:
    """Whether the embedding's gradient is added to buffers of its own type row by row."""
    return batch.device_type == "cpu" and batch.compute_bytes == 4


def _block(
    config: LlamaConfig,
    batch: MicroBatch,
    index: int,
    recomputed_from: int | None,
    *,
    direct: bool,
) -> UnitActivations:
    transients = _transients(config, batch, direct=direct)
    unkept = _before_adapters(config, batch) if index == 1 else 0
    if recomputed_from is None:
        return UnitActivations(kept=block_activations(config, batch) - unkept, **transients)
    kept = batch.tensor_bytes(config.hidden_size) if index == recomputed_from else 0
    if config.keeps_core:
        width = config.kv_channels * batch.compute_bytes
        kept += batch.num_tokens * config.num_attention_heads * (width + 4)
    recomputed = block_activations(config, batch) - max(kept, unkept)
    transients["in_forward"] += recomputed
    return UnitActivations(kept=kept, recomputed=recomputed, **transients)


def _transients(config: LlamaConfig, batch: MicroBatch, *, direct: bool) -> dict[str, int]:
    """Peak bytes of a block's forward and backward in addition to those it keeps, by field."""
    residual = batch.tensor_bytes(config.hidden_size)
    ffn = batch.tensor_bytes(config.ffn_hidden_size)
    weight = config.hidden_size * config.ffn_hidden_size * batch.compute_bytes
    norm = norm_backward(config, batch)
    # Backward peaks at the start of the MLP: the gradients of w_down, of gate and up and of their
    # product. Gate and up are then freed, which makes room for the gradients of their producers.
    found = {
        "in_forward": residual + max(residual, ffn),
        "before_gradients": residual + 3 * ffn + weight + _adapter_transient(config, batch),
        "in_backward": max(residual + weight, norm + 2 * weight),
    }
    if config.torch_compile is not None:
        found |= _compiled_backward(config, batch, direct=direct)
    elif config.fp8_format is not None:
        found |= _fp8_transients(config, batch, found, direct=direct)
    elif config.lora is None and direct:
        found["before_gradients"] = residual + 2 * ffn
        found["in_backward"] = max(residual + 3 * ffn, norm)
    if config.keeps_scores:  # they and their mask, then their gradients
        scores = residual + 8 * batch.num_tokens * config.num_attention_heads * batch.seq_length
        for field in ("in_forward", "in_backward"):
            found[field] = max(found[field], scores)
    if batch.context.ring > 1:
        # The block's input to the MLP is free by then, as are gate and up.
        travelling = travelling_bytes(config, batch) - 2 * ffn
        found["in_backward"] = max(found["in_backward"], travelling)
    if config.lora is not None:
        found["in_forward"] += ffn * len({"w_gate", "w_up"} & {*config.lora.targets})
    return found


def _fp8_transients(
    config: LlamaConfig, batch: MicroBatch, without: Mapping[str, int], *, direct: bool
) -> dict[str, int]:
    """The same where operands are cast; weights are counted as cast at every use.

    Backward casts a gradient as it is and transposed, and transposes the inputs of weights, whose
    gradients are products that are then copied or added to their buffers.
    """
    size, on_gpu = batch.compute_bytes, batch.device_type == "cuda"
    residual, norm = batch.tensor_bytes(config.hidden_size), norm_backward(config, batch)
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
    beside = residual + 2 * narrow + (3 if on_gpu else 2) * size * wide
    before = max(beside + cast * wide, residual + 2 * narrow + size * wide + cast * weight)
    product = beside + wide + size * weight
    inputs = max(
        residual + 2 * narrow + 3 * size * wide,
        norm + 4 * wide,
        4 * residual + narrow + 4 * wide + cast * weight,
    )
    if not (direct or on_gpu or size == 4):  # to add it, a CPU converts the product
        product += 4 * weight
    return found | {"before_gradients": before, "in_backward": max(product, inputs)}


def _compiled_backward(config: LlamaConfig, batch: MicroBatch, *, direct: bool) -> dict[str, int]:
    """Peak bytes of a compiled block's backward, which is at its most in the MLP.

    Gate and up, which are counted as kept, are freed before the first gradient of a weight.
    """
    residual = batch.tensor_bytes(config.hidden_size)
    ffn = batch.tensor_bytes(config.ffn_hidden_size)
    weight = config.hidden_size * config.ffn_hidden_size * batch.compute_bytes
    before, after = residual + 4 * ffn, 5 * residual
    if config.fp8_format is None:
        if not direct:
            before, after = max(before, residual + ffn + weight), after + weight
        return {"before_gradients": before, "in_backward": after}
    # Its products arrive together, after the graph.
    output = config.hidden_size * _attention_widths(config)[0] * batch.compute_bytes
    together = 3 * weight + output + residual - 2 * ffn
    return {"before_gradients": max(before, together), "in_backward": max(after, together)}


def _adapter_transient(config: LlamaConfig, batch: MicroBatch) -> int:
    """Peak bytes of a block's adapters, and of their dropout's mask, in the MLP's backward."""
    lora = config.lora
    if lora is None or "w_down" not in lora.targets:
        return 0
    mask = 1 if lora.dropout else 0
    products = config.ffn_hidden_size * (2 * batch.compute_bytes + mask)
    weight = config.hidden_size * config.ffn_hidden_size * batch.compute_bytes
    # No gradient of the frozen weight is made.
    return batch.num_tokens * (products + lora.rank * batch.compute_bytes) - weight


def _before_adapters(config: LlamaConfig, batch: MicroBatch) -> int:
    """Bytes that the first block with adapters does not keep, since nothing before them trains."""
    targets = {*config.lora.targets} if config.lora is not None else set()
    if not targets or targets & {"wq", "wk", "wv"}:
        return 0
    query, key = _attention_widths(config)
    width = config.hidden_size + query + 2 * key
    if "wo" not in targets:
        width += query
        if targets == {"w_down"}:
            width += config.hidden_size
    return _with_scores(config, batch, width)


def block_activations(config: LlamaConfig, batch: MicroBatch) -> int:
    """Bytes that a block needs for backward, but for core attention's if that is recomputed."""
    query, key = _attention_widths(config)
    width = 2 * config.hidden_size + 2 * query + 2 * key + 2 * config.ffn_hidden_size
    # A compiled graph keeps attention's output once more, as the next matmul reads it.
    in_fp8 = query if config.torch_compile is not None and config.fp8_format is not None else 0
    return _with_scores(config, batch, width) + batch.num_tokens * in_fp8


def _attention_widths(config: LlamaConfig) -> tuple[int, int]:
    """Elements per token of all query heads, and of all key heads."""
    query = config.num_attention_heads * config.kv_channels
    return query, config.num_query_groups * config.kv_channels


def _with_scores(config: LlamaConfig, batch: MicroBatch, width: int) -> int:
    """Bytes of `width` elements per token, and of what attention and its norms keep beside them."""
    without_core = config.recompute is not None and config.recompute.core_attention
    in_fp32 = 0 if without_core else config.num_attention_heads  # log-sum-exp
    if config.keeps_scores and not without_core:
        query, key = _attention_widths(config)
        # Instead of queries, keys and values: an fp32 copy of each for every query head.
        width -= query + 2 * key
        in_fp32 = 3 * query + config.num_attention_heads * batch.seq_length
    if batch.context.heads > 1 and not without_core:
        query, key = _attention_widths(config)
        repeats = max(1, batch.context.heads // config.num_query_groups)
        width += query + 2 * (repeats - 1) * key
    if config.qk_layernorm:
        width += sum(_attention_widths(config))
        in_fp32 += config.num_attention_heads + config.num_query_groups
    return batch.num_tokens * (width * batch.compute_bytes + 4 * in_fp32)


def matmuls_write(grad_bytes: int, batch: MicroBatch) -> bool:
    """Whether matmuls write weight gradients into buffers of such elements, without a copy."""
    in_fp32 = grad_bytes == 4 and batch.device_type == "cuda"
    return in_fp32 or grad_bytes == batch.compute_bytes


def norm_backward(config: LlamaConfig, batch: MicroBatch) -> int:
    """Bytes for the backward of a norm and the linear layers after it, without their weights.

    These are the gradients of the block's output, of the normalized input and of the input, and the
    normalized input; on a CPU, below fp32, the norm uses two fp32 tensors instead of the last one.
    """
    residual = batch.tensor_bytes(config.hidden_size)
    if batch.device_type == "cpu" and batch.compute_bytes < 4:
        return 3 * residual + 2 * residual * 4 // batch.compute_bytes
    return 4 * residual


def _head(config: LlamaConfig, batch: MicroBatch, grad_bytes: int) -> UnitActivations:
    residual = batch.tensor_bytes(config.hidden_size)
    weight = config.vocab_size * config.hidden_size * batch.compute_bytes
    tied = config.tie_embeddings_and_output_weights
    loss = _tied_loss(config, batch) if tied else _chunk_of_loss(config, batch)[0]
    return UnitActivations(
        kept=batch.num_tokens * 4 + 2 * residual + (weight if tied else 0),
        in_forward=residual + loss,
        in_loss=0 if tied else _written_loss(config, batch, grad_bytes),
        before_gradients=residual,
        in_backward=residual,
        # A tied weight's gradient is kept until the embedding's gradient exists.
        kept_to_the_end=weight if tied else 0,
    )


def _chunk_of_loss(config: LlamaConfig, batch: MicroBatch) -> tuple[int, int]:
    """Peak bytes of a chunk of tokens: up to its logits' gradient, and for the weight's.

    The fp32 logits become probabilities and their gradient in place. Below fp32 the product before
    them, and the gradient after them, are tensors of their own on a CPU; on a GPU Triton replaces
    the product by the gradient. Masked inputs, and these times the tokens' weights, are others.
    """
    chunk = min(batch.num_tokens, LOSS_CHUNK_TOKENS)
    size = batch.compute_bytes
    in_place = size == 4 or batch.device_type == "cuda"
    logits = chunk * config.vocab_size * (size if in_place else 4 + size)
    gradient = chunk * config.vocab_size * size
    inputs = chunk * config.hidden_size * size
    return logits + inputs, gradient + 2 * inputs


def _output_grad_transient(numel: int, grad_bytes: int, batch: MicroBatch) -> tuple[int, int]:
    """Bytes of the sum over chunks of an output weight's gradient, and of one chunk's product.

    Both are in addition to the buffer, with elements of `grad_bytes`, and 0 if there is none:
    matmuls write into the buffer, or into the sum. A CPU converts the product before adding it.
    """
    sums = batch.num_tokens > LOSS_CHUNK_TOKENS and grad_bytes < 4
    written = 4 if sums else grad_bytes
    product = numel * (batch.compute_bytes + (4 if batch.device_type == "cpu" else 0))
    return 4 * numel if sums else 0, 0 if matmuls_write(written, batch) else product


def _written_loss(config: LlamaConfig, batch: MicroBatch, grad_bytes: int) -> int:
    before, after = _chunk_of_loss(config, batch)
    numel = config.vocab_size * config.hidden_size
    total, product = _output_grad_transient(numel, grad_bytes, batch)
    return batch.tensor_bytes(config.hidden_size) + total + max(before, after + product)


def _tied_loss(config: LlamaConfig, batch: MicroBatch) -> int:
    """Peak bytes of the loss in addition to the gradients that it keeps."""
    before, after = _chunk_of_loss(config, batch)
    kept = config.vocab_size * config.hidden_size * batch.compute_bytes
    if batch.num_tokens <= LOSS_CHUNK_TOKENS:
        return max(before - kept, after)  # the weight's gradient is computed last
    if batch.compute_bytes == 4:
        return max(before, after)
    # Several chunks: the weight's gradient is summed in fp32, and kept as a two-byte copy.
    total, product = _output_grad_transient(config.vocab_size * config.hidden_size, 2, batch)
    return total + max(before, after + product) - kept
