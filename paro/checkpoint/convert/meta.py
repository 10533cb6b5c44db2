"""Reads Meta's original folders: params.json, and consolidated.*.pth per model-parallel rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NotRequired, TypedDict

import torch
from torch import Tensor

from model.config import LLAMA_PRESETS, LlamaConfig
from model.units import cut_dims, name_in, parameter_shapes
from paro.checkpoint.convert.hugging_face import tokenizer_of
from paro.checkpoint.convert.source import (
    LazyTensor,
    ModelSource,
    checked_tensors,
    joined,
    lazy,
    picked,
)
from paro.checkpoint.convert.tensor_files import is_weight, load_torch_file
from paro.errors import UserError, about
from paro.files.regular_file import paths_in, read_bytes
from paro.files.schema import Positive, read_json

PARAMS = "params.json"

NAMES = {
    "embedding.weight": "tok_embeddings.weight",
    "head.norm": "norm.weight",
    "head.weight": "output.weight",
    "blocks.*.attention_norm": "layers.*.attention_norm.weight",
    "blocks.*.wq": "layers.*.attention.wq.weight",
    "blocks.*.wk": "layers.*.attention.wk.weight",
    "blocks.*.wv": "layers.*.attention.wv.weight",
    "blocks.*.wo": "layers.*.attention.wo.weight",
    "blocks.*.mlp_norm": "layers.*.ffn_norm.weight",
    "blocks.*.w_gate": "layers.*.feed_forward.w1.weight",
    "blocks.*.w_up": "layers.*.feed_forward.w3.weight",
    "blocks.*.w_down": "layers.*.feed_forward.w2.weight",
}
# Tensors that sizes are read from.
_MEASURED = (
    "tok_embeddings.weight",
    "layers.0.attention.wq.weight",
    "layers.0.feed_forward.w1.weight",
)


class _Params(TypedDict):
    """The fields of params.json that are read."""

    dim: Positive
    n_layers: Positive
    n_heads: Positive
    n_kv_heads: NotRequired[Positive | None]
    norm_eps: float
    rope_theta: NotRequired[float]
    use_scaled_rope: NotRequired[bool]
    rope_scaling_factor: NotRequired[float]


def open_meta(directory: Path) -> ModelSource:
    """Open a folder as Meta published it; `UserError` names the bad file."""
    if not (directory / PARAMS).is_file():
        raise UserError(f"{directory} holds no model of Meta's: it has no {PARAMS}")
    params: _Params = read_json(directory / PARAMS, _Params)
    shards: list[Mapping[str, Tensor]] = [_tensors_in(path) for path in _files(directory)]
    config = _config(directory, params, shards)
    shapes, dims = parameter_shapes(config), cut_dims(config)
    called = partial(name_in, NAMES)
    if shards[0][_MEASURED[0]].shape[1] != config.hidden_size:
        dims["embedding.weight"] = 1
    tensors = {
        name: joined([lazy(shard[called(name)]) for shard in shards], dims.get(name))
        for name in shapes
        if all(called(name) in shard for shard in shards)
    }
    tensors = checked_tensors(shapes, tensors, directory, called)
    model = directory / "tokenizer.model"
    companions = {model.name: model} if model.is_file() else {}
    notes = [f"{directory} has no generation config: none is written"]
    tokenizer = tokenizer_of(companions, begins=True)
    if tokenizer is None:
        notes.append(f"{directory} has no tokenizer: prompts are token ids")
    elif read_bytes(model)[:1] != b"\n":  # LLaMA-3's: text for another library, no SentencePiece
        companions, tokenizer = {}, None
        notes.append(f"{model} is left out: give tokenizer.json of the Hugging Face model instead")
    return ModelSource(
        config=config,
        tensors=turned(tensors, config.kv_channels),
        companions=companions,
        tokenizer=tokenizer,
        begins_with_bos=True,
        notes=tuple(notes),
    )


def turned(
    tensors: Mapping[str, LazyTensor], head: int, *, to_pairs: bool = False
) -> dict[str, LazyTensor]:
    """Return parameters, of queries and keys with the rows of each head permuted.

    From an order for RoPE on channels (2i, 2i + 1) of `head` channels to one for RoPE on channels
    (i, i + H/2), or back with `to_pairs`.
    """
    order = torch.arange(head).view(-1, 2).t().flatten()
    order = order.argsort() if to_pairs else order
    changed = dict(tensors)
    for name in (name for name in tensors if name.endswith(("wq", "wk"))):
        heads = torch.arange(tensors[name].shape[0]).view(-1, head)
        changed[name] = picked(tensors[name], heads[:, order].flatten())
    return changed


def _files(directory: Path) -> list[Path]:
    files = paths_in(directory, "consolidated.*.pth")
    for number in range(max(1, len(files))):
        expected = directory / f"consolidated.{number:02d}.pth"
        if expected not in files:
            raise UserError(f"{expected} is missing")
    return files


def _tensors_in(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file; `UserError` if they are not a model's."""
    content = load_torch_file(path)
    entries = content.items() if isinstance(content, dict) else ()
    tensors = {name: value for name, value in entries if is_weight(value)}
    for name in _MEASURED:
        if name not in tensors or tensors[name].ndim != 2 or tensors[name].numel() == 0:
            raise UserError(f"{path} holds no model: it has no {name}")
    return tensors


def _config(directory: Path, params: _Params, shards: list[Mapping[str, Tensor]]) -> LlamaConfig:
    """Take sizes from params.json, or from the tensors where it lacks them."""
    hidden, layers, heads = params["dim"], params["n_layers"], params["n_heads"]
    base, is_scaled = params.get("rope_theta", 10000.0), params.get("use_scaled_rope", False)
    first = shards[0]
    embedding, query, gate = _MEASURED
    # LLaMA-3 splits the vocabulary, older models the channels.
    by_rows = first[embedding].shape[1] == hidden
    vocab_rows = [shard[embedding].shape[0] for shard in shards]
    rows = first[query].shape[0]
    if rows * len(shards) != hidden:
        missing = directory / f"consolidated.{len(shards):02d}.pth"
        raise UserError(f"{missing} is missing: there are {len(shards)} of {hidden // rows}")
    with about(f"{directory / PARAMS}: "):
        config = LlamaConfig(
            num_layers=layers,
            hidden_size=hidden,
            ffn_hidden_size=sum(shard[gate].shape[0] for shard in shards),
            num_attention_heads=heads,
            num_query_groups=params.get("n_kv_heads") or heads,
            kv_channels=hidden // heads,
            # params.json lacks it; its RoPE fields are those of one kind of model.
            max_position_embeddings=131072 if is_scaled else 8192 if base > 10000.0 else 2048,
            vocab_size=sum(vocab_rows) if by_rows else vocab_rows[0],
            rotary_base=base,
            use_rope_scaling=is_scaled,
            rope_scaling_factor=params.get("rope_scaling_factor", 8.0),
            norm_epsilon=params["norm_eps"],
            tie_embeddings_and_output_weights="output.weight" not in first,
        )
    return _as_published(config, first)


def _as_published(config: LlamaConfig, shard: Mapping[str, Tensor]) -> LlamaConfig:
    """Fill in fields that params.json lacks from the preset of equal sizes.

    LLaMA-3.2's files state neither its RoPE scaling factor of 32 nor that its head, which is stored
    too, is tied.
    """
    free = ("tie_embeddings_and_output_weights", "rope_scaling_factor", "max_position_embeddings")
    for preset in LLAMA_PRESETS.values():
        if replace(config, **{name: getattr(preset, name) for name in free}) != preset:
            continue
        tied = preset.tie_embeddings_and_output_weights
        if tied and not config.tie_embeddings_and_output_weights:
            tied = torch.equal(shard["output.weight"], shard["tok_embeddings.weight"])
        return replace(preset, tie_embeddings_and_output_weights=tied)
    return config
