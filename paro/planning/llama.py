"""What LLaMA's units hold, and which tensors they keep for backward."""

# Letters as in model/llama.py, T = B * S tokens of a micro-batch. A block keeps
#
#     compute type   x, norm(x), q, k, v, attention's output, x + attention, norm of that,
#                    gate, silu(gate), up, silu(gate) * up       T * (4 D + (2 N + 2 K) H + 4 F)
#     fp32           a scale per token and norm, log-sum-exp per token and query head
#
# where x is the output of the unit before. q and k are kept turned, the attention's output serves
# the attention and the output projection. That is for kernels that a GPU has: RMSNorm in one
# kernel, attention that keeps no scores (flash; in fp32 with grouped heads CUDA has none, and all
# scores are kept, which is not counted here). Without a fused norm (CPU) each norm keeps its input
# and the normalized input in fp32 instead of x.
#
# The head keeps its input and, as the loss makes its gradients in forward, the gradients of its
# normalized input and of the output weight. A block recomputed whole keeps its input alone, a run
# of blocks recomputed together one input; recomputing attention's core saves the log-sum-exp.
# Blocks with frozen parameters are counted as if all were trained; below the first trained unit
# nothing is kept.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from model.config import LlamaConfig, RecomputeConfig, parameter_shapes
from paro.planning.cost_model import UnitShapes, UnitSize, size_units

CROSS_ENTROPY_CHUNK_BYTES = 64 << 20  # model/cross_entropy.py's, which may not be imported: torch


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The tokens that a rank computes at a time, and with what kernels."""

    size: int
    seq_length: int
    compute_bytes: int  # of an element
    fused_norm: bool  # CUDA's; on CPU the norm is made of several operations

    @property
    def num_tokens(self) -> int:
        return self.size * self.seq_length


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitActivations:
    """Bytes that a unit's computation holds; transients are what it needs at most beside `kept`."""

    kept: int  # from forward to the end of the unit's backward
    recomputed: int = 0  # from recomputation to the end of the unit's backward
    recomputed_from: int  # the index of the unit with which the recomputation begins
    in_forward: int
    before_gradients: int  # in backward, until the first of the unit's gradients is there
    in_backward: int  # from then on
    kept_to_the_end: int = 0  # of `kept`: until the end of the whole backward


def units_of(
    config: LlamaConfig,
    *,
    world_size: int,
    is_trained: Callable[[str], bool] = lambda _name: True,
) -> tuple[UnitSize, ...]:
    """Embedding, blocks and head, as they are sharded over `world_size` ranks."""
    shapes = parameter_shapes(config)

    def unit(name: str, *, borrows: tuple[str, ...] = (), needs_weight: bool = True) -> UnitShapes:
        own = {key: shape for key, shape in shapes.items() if key.startswith(f"{name}.")}
        return UnitShapes(
            name=name, shapes=own, borrows=borrows, backward_needs_weight=needs_weight
        )

    tied = config.tie_embeddings_and_output_weights
    units = (
        unit("embedding", needs_weight=False),
        *(unit(f"blocks.{layer}") for layer in range(config.num_layers)),
        unit("head", borrows=("embedding",) if tied else ()),
    )
    return size_units(units, world_size=world_size, is_trained=is_trained)


def activations_of(config: LlamaConfig, batch: MicroBatch) -> tuple[UnitActivations, ...]:
    """What each of `units_of` holds of a micro-batch."""
    blocks = (_block(config, batch, layer) for layer in range(config.num_layers))
    return (_embedding(config, batch), *blocks, _head(config, batch))


def _embedding(config: LlamaConfig, batch: MicroBatch) -> UnitActivations:
    gradient = config.vocab_size * config.hidden_size * batch.compute_bytes
    tied = config.tie_embeddings_and_output_weights
    return UnitActivations(
        kept=batch.num_tokens * 8,  # token ids
        recomputed_from=0,
        in_forward=0,
        before_gradients=_residual(config, batch) + gradient,
        in_backward=0 if tied else gradient,  # added to the head's, which waits for it
    )


def _block(config: LlamaConfig, batch: MicroBatch, layer: int) -> UnitActivations:
    index = layer + 1  # behind the embedding
    residual = _residual(config, batch)
    ffn = batch.num_tokens * config.ffn_hidden_size * batch.compute_bytes
    down = config.hidden_size * config.ffn_hidden_size * batch.compute_bytes
    # Backward holds most at the start of the MLP: the gradient of the product with that of w_down,
    # or right after, when it turns into the gradients of its two factors.
    transients = {
        "before_gradients": residual + ffn + down,
        "in_backward": residual + max(ffn + down, 2 * ffn),
    }
    first = _recomputed_from(config.recompute, layer)
    if first is None:
        core = config.recompute is None or config.recompute.granularity == "full"
        return UnitActivations(
            kept=block_activations(config, batch, with_core=core),
            recomputed_from=index,
            in_forward=2 * residual,
            **transients,
        )
    kept = residual if layer == first else 0
    # What a norm keeps is the input itself, unless it is a copy in fp32.
    same = batch.fused_norm or batch.compute_bytes == 4
    recomputed = block_activations(config, batch, with_core=True) - (kept if same else 0)
    return UnitActivations(
        kept=kept,
        recomputed=recomputed,
        recomputed_from=first + 1,
        in_forward=recomputed + 2 * residual,
        **transients,
    )


def _recomputed_from(recompute: RecomputeConfig | None, layer: int) -> int | None:
    """The layer with which the recomputation of this one begins; None where it keeps all."""
    if recompute is None or recompute.granularity == "selective":
        return None
    if recompute.method == "uniform":
        return layer - layer % recompute.num_layers
    return layer if layer < recompute.num_layers else None


def _residual(config: LlamaConfig, batch: MicroBatch) -> int:
    """One tensor as wide as the residual stream."""
    return batch.num_tokens * config.hidden_size * batch.compute_bytes


def block_activations(config: LlamaConfig, batch: MicroBatch, *, with_core: bool) -> int:
    """What a block keeps that is not recomputed; `with_core`: nor is its attention's core."""
    query = config.num_attention_heads * config.kv_channels
    key = config.num_query_groups * config.kv_channels
    width = 2 * config.hidden_size + 2 * query + 2 * key + 4 * config.ffn_hidden_size
    log_sum_exp = 4 * config.num_attention_heads if with_core else 0
    per_token = width * batch.compute_bytes + log_sum_exp
    return batch.num_tokens * per_token + 2 * norm_activations(config, batch)


def norm_activations(config: LlamaConfig, batch: MicroBatch) -> int:
    """What a norm keeps, the input included."""
    width = batch.compute_bytes if batch.fused_norm else 8
    return batch.num_tokens * (config.hidden_size * width + 4)


def _head(config: LlamaConfig, batch: MicroBatch) -> UnitActivations:
    residual = _residual(config, batch)
    weight = config.vocab_size * config.hidden_size * batch.compute_bytes
    return UnitActivations(
        kept=norm_activations(config, batch) + residual + weight,
        recomputed_from=config.num_layers + 1,
        in_forward=residual + _cross_entropy_transient(config, batch),
        before_gradients=residual,
        in_backward=residual,
        # The gradient of a tied weight waits for that of the embedding.
        kept_to_the_end=weight if config.tie_embeddings_and_output_weights else 0,
    )


def _cross_entropy_transient(config: LlamaConfig, batch: MicroBatch) -> int:
    """What the loss needs at most beside the gradients that it keeps."""
    chunk = min(batch.num_tokens, max(1, CROSS_ENTROPY_CHUNK_BYTES // (4 * config.vocab_size)))
    logits = 4 * chunk * config.vocab_size  # fp32
    weight = 4 * config.vocab_size * config.hidden_size
    kept = weight * batch.compute_bytes // 4
    one_chunk = chunk == batch.num_tokens
    exponentials = 2 * logits  # in log-sum-exp, before there is a gradient
    if batch.compute_bytes == 4:
        # Behind the first chunk, the one before is still there.
        return max(exponentials - kept, logits) if one_chunk else 3 * logits
    gradient = logits // 2
    if one_chunk:
        return max(exponentials - kept, logits + gradient)
    # Several chunks: the weight's gradient is summed in fp32, and kept as a two-byte copy. Either
    # a chunk is made while the one before is still there, or a term of the sum, or the copy, is.
    return max(2 * (logits + gradient) + weight - kept, logits + gradient + weight)
