"""LLaMA: RMSNorm, rotary embedding, grouped-query attention, SwiGLU, tied or untied head."""

# In addition to LLaMA: Qwen2's biases on the query, key and value projections, and Qwen3's RMSNorm
# on each head's query and key. Mistral without a sliding window is LLaMA.

# B batch, S sequence, D hidden, N query heads, K key and value heads, H head size, F feed-forward,
# V vocabulary. Every unit (embedding, block, head) is one module that is called once in forward, so
# that a sharding layer can gather its parameters before the call and free them after it. Linear
# layers are plain parameters. Projections are not fused, since rotating weights cut attention by
# heads and the MLP by columns, and since checkpoints name each projection.
#
# Each part of a unit that uses weight matrices is a method that takes its sizes from the weights:
# given a slice of each weight it computes a partial result, and another method joins the partial
# results of all slices. model/units.py lists units, parameters and parts.

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from model.attention import QKV, Core, Documents, SavedAttention, documents_of
from model.block_attention import attend_saving
from model.config import LlamaConfig
from model.cross_entropy import ZLoss, join_scores, linear_cross_entropy, slice_scores
from model.embedding import Embedding
from model.fp8 import Fp8, cache_casts
from model.fusion import compiled
from model.layers import checkpointed, gated, gated_linear, linear, normed_linears
from model.lora import AdaptedBlock, DropKey
from model.matmul import number_weights
from model.mup import embedding_scale, logit_scale
from model.norm import SharedNorm, Slices, add_slices_after, rms_norm
from model.rotary import rotate, rotations
from model.units import first_trained_unit, recomputed_groups, unit_specs


class TokenInfo(NamedTuple):
    """Rotations, documents and attention core of a micro-batch, shared by all blocks."""

    cos: Tensor  # cosines of rotary angles for every token, as `rotations` makes them
    sin: Tensor
    documents: Documents | None = None  # documents of the samples; None: one per sample
    drops: DropKey | None = None  # key of the adapters' dropout; None: nothing is dropped
    splits_documents: bool = False  # True: this or another micro-batch has several per sample
    core: Core | None = None  # attention over ranks or a KV cache; None: within this rank's `x`
    saved: SavedAttention | None = None  # attention outputs saved from recomputation


class Block(AdaptedBlock):
    """A pre-norm transformer block: attention and MLP, each added to the residual stream."""

    attention_norm: nn.Parameter
    wq: nn.Parameter
    wk: nn.Parameter
    wv: nn.Parameter
    wo: nn.Parameter
    bq: nn.Parameter
    bk: nn.Parameter
    bv: nn.Parameter
    q_norm: nn.Parameter
    k_norm: nn.Parameter
    mlp_norm: nn.Parameter
    w_gate: nn.Parameter
    w_up: nn.Parameter
    w_down: nn.Parameter

    def __init__(self, config: LlamaConfig, *, layer: int, recomputed: bool) -> None:
        super().__init__(config, layer=layer)
        self.recomputed = recomputed  # True: backward recomputes this block alone, from its input
        fp8, fused = config.fp8_format, config.fuses_fp8_casts
        self.fp8 = Fp8(fp8, fused) if fp8 is not None else None
        self.recomputes_core = config.recompute is not None and config.recompute.core_attention

    def forward(self, x_BSD: Tensor, info: TokenInfo) -> Tensor:
        # Checkpoint inside forward, so that recomputation does not run this module's hooks again.
        if self.recomputed and torch.is_grad_enabled():
            return _recomputed(self.config, self._body, x_BSD, info)
        return self._body(x_BSD, info)

    def _body(self, x_BSD: Tensor, info: TokenInfo) -> Tensor:
        backend = self.config.torch_compile
        if backend is None:
            return self._plain(x_BSD, info)
        plain, project, finish = _compiled_block(backend)
        number_weights(self.parameters())
        if self.fp8 is not None:
            projections = (self.wq, self.wk, self.wv, self.wo, self.w_gate, self.w_up, self.w_down)
            cache_casts(projections, x_BSD.dtype, self.fp8)
        whole = not (self.recomputes_core or self.config.keeps_scores)
        if whole and not (info.splits_documents or info.core or info.saved):
            return plain(self, x_BSD, info)
        qkv = project(self, x_BSD, info.cos, info.sin)
        return finish(self, x_BSD, self._core(qkv, info))

    def _plain(self, x_BSD: Tensor, info: TokenInfo) -> Tensor:
        return self.mlp(self.attention(x_BSD, info), info.drops)

    def attention(self, x_BSD: Tensor, info: TokenInfo, norm: SharedNorm | None = None) -> Tensor:
        """Return `x` plus the attention output [B, S, D].

        Of slices of the weights, which share `norm`: a part of the output, without `x`.
        """
        x_BSD, qkv = self._projected(x_BSD, info.cos, info.sin, info.drops, norm)
        y_BSD = self._output(self._core(qkv, info), info.drops)
        return x_BSD + y_BSD if norm is None else y_BSD

    def join_attention(self, slices: Slices, x_BSD: Tensor, *args: Any) -> Tensor:
        return x_BSD + add_slices_after(slices, self.attention_norm, self.config, x_BSD, *args)

    def project(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> QKV:
        """Compute queries [B, S, N, H], keys and values [B, S, K, H]; rotate queries and keys."""
        return self._projected(x_BSD, cos, sin, None, None)[1]

    def _projected(
        self,
        x_BSD: Tensor,
        cos: Tensor,
        sin: Tensor,
        drops: DropKey | None,
        norm: SharedNorm | None,
    ) -> tuple[Tensor, QKV]:
        """Return `x` for the residual addition, and queries, keys and values."""
        epsilon, head = self.config.norm_epsilon, (-1, self.config.kv_channels)
        names, sources = ("wq", "wk", "wv"), (x_BSD, self.attention_norm)
        biases = (self.bq, self.bk, self.bv) if self.config.add_qkv_bias else ()
        x_BSD, projections = self._after_norm(norm, sources, names, drops, biases)
        q_BSNH, k_BSKH, v_BSKH = (part.unflatten(-1, head) for part in projections)
        if self.config.qk_layernorm:
            q_BSNH = rms_norm(q_BSNH, self.q_norm, epsilon)
            k_BSKH = rms_norm(k_BSKH, self.k_norm, epsilon)
        how = {"fused": self.config.fuses_rotary, "for_cast": self.config.fuses_fp8_casts}
        q_BSNH, k_BSKH = (rotate(x, cos, sin, **how) for x in (q_BSNH, k_BSKH))
        return x_BSD, (q_BSNH, k_BSKH, v_BSKH)

    def _after_norm(
        self,
        norm: SharedNorm | None,
        sources: tuple[Tensor, Tensor],
        names: tuple[str, ...],
        drops: DropKey | None,
        biases: tuple[Tensor, ...] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the norm's input for the residual addition, and projections of the norm.

        Of slices of the weights, which share `norm`: parts of the projections.
        """
        config, weights = self.config, [getattr(self, name) for name in names]
        if norm is None:
            how = {"fused": config.fuses_norms, "for_cast": config.fuses_fp8_casts}
            shared = SharedNorm(sources[0], sources[1], config.norm_epsilon, **how)
            parts = normed_linears(shared, *sources, *weights, fp8=self.fp8, passes_x=True)
            x_BSD, made = parts[0], [*parts[1:]]  # torch 2.11 compiles "x, *made" to a tuple
        else:
            shared, x_BSD = norm, sources[0]
            made = [*normed_linears(norm, *sources, *weights, fp8=self.fp8)]
        for part, bias in zip(made, biases, strict=False):
            part.add_(bias)
        # Backward runs in the opposite order: the adapter of the first weight first.
        for index in reversed(range(len(names))):
            made[index] = self.adapted(names[index], made[index], shared, sources, drops)
        if norm is None:
            shared.release()
        return x_BSD, made

    def _core(self, qkv: QKV, info: TokenInfo) -> Tensor:
        core = info.core or partial(attend_saving, self.config.attention_backend)
        if self.recomputes_core and torch.is_grad_enabled():
            return checkpointed(lambda *qkv: core(qkv, info.documents, None), *qkv)
        return core(qkv, info.documents, info.saved)

    def _output(self, out_BSNH: Tensor, drops: DropKey | None) -> Tensor:
        out_BSD = out_BSNH.flatten(-2)
        y_BSD = linear(out_BSD, self.wo, self.fp8)
        return self.adapted_alone("wo", y_BSD, lambda x_BSD: x_BSD, (out_BSD,), drops)

    def finish(self, x_BSD: Tensor, out_BSNH: Tensor) -> Tensor:
        """Compute the block's output from its input and the output of attention's core."""
        return self.mlp(x_BSD + self._output(out_BSNH, None), None)

    def mlp(self, x_BSD: Tensor, drops: DropKey | None, norm: SharedNorm | None = None) -> Tensor:
        """Return `x` plus the MLP output [B, S, D].

        Of slices of the weights, which share `norm`: a part of the output, without `x`.
        """
        sources, names = (x_BSD, self.mlp_norm), ("w_gate", "w_up")
        x_BSD, (gate_BSF, up_BSF) = self._after_norm(norm, sources, names, drops)
        fused = self.config.fuses_swiglu
        y_BSD = gated_linear(gate_BSF, up_BSF, self.w_down, self.fp8, fused=fused)
        y_BSD = self.adapted_alone("w_down", y_BSD, gated, (gate_BSF, up_BSF), drops)
        return x_BSD + y_BSD if norm is None else y_BSD

    def join_mlp(self, slices: Slices, x_BSD: Tensor, *args: Any) -> Tensor:
        return x_BSD + add_slices_after(slices, self.mlp_norm, self.config, x_BSD, *args)


@cache
def _compiled_block(backend: str) -> tuple[Callable[..., Any], ...]:
    """Return three compiled functions: a block; before attention's core; after it."""
    parts = (Block._plain, Block.project, Block.finish)
    return tuple(compiled(part, backend) for part in parts)


class Head(nn.Module):
    """Final norm, output layer and loss; a tied output weight is passed to forward."""

    norm: nn.Parameter

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.starts = {"weight": 0}  # token id of the first row; above 0 in a vocabulary slice
        self.weight: nn.Parameter | None = None  # output weight; None: tied to the embedding
        self._z_loss: ZLoss | None = None

    def forward(
        self,
        x_BSD: Tensor,
        labels_BS: Tensor | None,
        token_weights_BS: Tensor | None,
        tied_VD: Tensor | None,
    ) -> Tensor:
        weight_VD = self.weight if tied_VD is None else tied_VD
        assert weight_VD is not None, "a tied head needs the embedding's weight"
        x_BSD = rms_norm(x_BSD, self.norm, self.config.norm_epsilon)
        if (scale := logit_scale(self.config)) != 1.0:
            x_BSD = x_BSD.mul_(scale)
        if labels_BS is None:
            return linear(x_BSD, weight_VD)
        assert token_weights_BS is not None, "a loss needs the weight of every token"
        return self.loss(x_BSD, labels_BS, token_weights_BS, weight_VD)

    def loss(
        self, x_BSD: Tensor, labels_BS: Tensor, token_weights_BS: Tensor, weight_VD: Tensor
    ) -> Tensor:
        fused, z_loss = self.config.fuses_loss, self._z_loss_on(x_BSD.device)
        inputs = x_BSD, weight_VD, labels_BS, token_weights_BS
        return linear_cross_entropy(*inputs, fused=fused, z_loss=z_loss)

    def _z_loss_on(self, device: torch.device) -> ZLoss | None:
        """Return the z-loss that a forward adds to; None if it is off, as in evaluations."""
        weight = self.config.z_loss_weight
        if not weight or not torch.is_grad_enabled():
            return None
        if self._z_loss is None:
            self._z_loss = ZLoss(weight, torch.zeros((), device=device))
        return self._z_loss

    def take_z_loss(self) -> Tensor | None:
        """Return the weighted z-loss of all forwards since the last call; None if it is off."""
        if self._z_loss is None:
            return None
        taken, self._z_loss = self._z_loss.total, None
        return taken

    def score_slice(
        self, x_BSD: Tensor, labels_BS: Tensor, token_weights_BS: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute a vocabulary slice's part of every token's loss, by `slice_scores`."""
        assert self.weight is not None, "no slice was put in the place of the weight"
        first_row = self.starts["weight"]
        return slice_scores(x_BSD, self.weight, labels_BS, token_weights_BS, first_row=first_row)

    def join_loss(
        self,
        slices: Iterable[Callable[..., tuple[Tensor, Tensor]]],
        x_BSD: Tensor,
        labels_BS: Tensor,
        token_weights_BS: Tensor,
        _weight_VD: Tensor,
    ) -> Tensor:
        scores = (run(x_BSD, labels_BS, token_weights_BS) for run in slices)
        return join_scores(scores, token_weights_BS, self._z_loss_on(x_BSD.device))


class Llama(nn.Module):
    """The whole model; its parameters are uninitialized until they are filled or loaded."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.core: Core | None = None  # context-parallel attention of all blocks; None: within `x`
        specs = unit_specs(self.config)
        # Groups of several blocks are recomputed by `forward`, not by each block.
        together = config.recompute is not None and config.recompute.group_size > 1
        self.embedding = Embedding(embedding_scale(config))
        self.blocks = nn.ModuleList(
            Block(config, layer=layer, recomputed=not together and spec.recomputed_from is not None)
            for layer, spec in enumerate(specs[1:-1])
        )
        self.head = Head(config)
        for spec in specs:
            module = self.get_submodule(spec.name)
            for name, shape in spec.shapes.items():
                setattr(module, name, nn.Parameter(torch.empty(shape)))
        self._together = together
        self._groups = recomputed_groups(specs, 0) if together else ()
        self._activations: torch.dtype | None = None  # type of activations; None: the weights'

    def freeze(
        self, is_trained: Callable[[str], bool], *, activations: torch.dtype | None = None
    ) -> None:
        """Freeze every parameter for whose name `is_trained` returns False.

        Blocks that backward then does not reach save no activations and are not recomputed.
        `activations` is the type of activations if frozen weights have another type.
        """
        self._activations = activations
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(is_trained(name))
        if self._together:
            specs = unit_specs(self.config)
            self._groups = recomputed_groups(specs, first_trained_unit(specs, is_trained))

    def forward(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor | None = None,
        token_weights_BS: Tensor | None = None,
        *,
        positions_BS: Tensor | None = None,
        document_lengths: tuple[int, ...] | None = None,
        seq_length: int | None = None,
        drops: DropKey | None = None,
    ) -> Tensor:
        """Compute logits [B, S, V]; or, with labels, the fp32 sum of token weight times loss.

        The token weights include the mask, 1 / number of tokens and the loss scale, so that
        backward can start from this sum directly.

        By default a sample is one document. `positions_BS`: each token's position within its
        document. `document_lengths`: of all documents of all samples; attention stays within each.
        Under context parallelism `tokens_BS` has a part of each sample; `seq_length` and
        `document_lengths` are of whole samples, and `core` attends to the other ranks' tokens.
        """
        x_BSD = self.embedding(tokens_BS)
        if self._activations is not None:
            x_BSD = x_BSD.to(self._activations)
        length = tokens_BS.shape[1] if seq_length is None else seq_length
        cos, sin = rotations(self.config, length, x_BSD.dtype, x_BSD.device)
        if positions_BS is not None:
            cos, sin = cos[positions_BS], sin[positions_BS]
        documents = documents_of(document_lengths, len(tokens_BS), tokens_BS.device)
        info = TokenInfo(cos, sin, documents, drops, document_lengths is not None, self.core)
        blocks, plain = list(self.blocks), 0
        for group in self._groups if torch.is_grad_enabled() else ():
            first, stop = group.start - 1, group.stop - 1  # the embedding is unit 0
            x_BSD = _run_blocks(blocks[plain:first], x_BSD, info)
            # Recomputation in backward runs the hooks on these blocks again.
            x_BSD = _recomputed(self.config, partial(_run_blocks, blocks[first:stop]), x_BSD, info)
            plain = stop
        x_BSD = _run_blocks(blocks[plain:], x_BSD, info)
        tied = self.config.tie_embeddings_and_output_weights
        tied_VD = self.embedding.weight if tied else None
        return self.head(x_BSD, labels_BS, token_weights_BS, tied_VD)


def _recomputed(
    config: LlamaConfig, run: Callable[[Tensor, TokenInfo], Tensor], x_BSD: Tensor, info: TokenInfo
) -> Tensor:
    """Run a function that backward runs again, maybe with attention's outputs saved."""
    saved = SavedAttention() if config.keeps_core else None
    y_BSD: Tensor = checkpointed(run, x_BSD, info._replace(saved=saved))
    if saved is not None:
        saved.is_second_run = True
    return y_BSD


def _run_blocks(blocks: list[nn.Module], x_BSD: Tensor, info: TokenInfo) -> Tensor:
    for block in blocks:
        x_BSD = block(x_BSD, info)
    return x_BSD
