"""Megatron-LM's `torch` format: reads any tensor-parallel size, writes for one rank."""

# Megatron-core's GPT model fuses tensors that this project keeps separate. Weights and biases have,
# per query group, the query heads, then the key head, then the value head:
#
#     linear_qkv.weight     q q q q k v | q q q q k v | ...      linear_fc1.weight     gate, up
#
# Tensor parallelism splits query groups and columns of the MLP, so every rank's tensors have this
# layout. Norms have two names: Transformer Engine fuses them into the linear layer after them.

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import torch
from torch import Tensor
from torch.serialization import skip_data

from model.config import LlamaConfig
from model.units import cut_dims, name_in, parameter_shapes
from paro.checkpoint.convert.hugging_face import (
    COMPANIONS,
    begins_with_bos,
    companions_in,
    tokenizer_of,
)
from paro.checkpoint.convert.source import LazyTensor, Source, checked_tensors, joined, unpadded
from paro.checkpoint.convert.tensor_files import fill_torch_file, is_weight, lazy, load_torch_file
from paro.checkpoint.directory import MAX_TRACKER_BYTES, TRACKER
from paro.errors import UserError
from paro.layout import Shape
from paro.untrusted.regular_file import read_bytes
from paro.untrusted.schema import Count, conform

FILE = "mp_rank_00/model_optim_rng.pt"
_BY_GROUP = ("wq", "wk", "wv", "bq", "bk", "bv")

_NAMES = {
    "embedding.weight": "embedding.word_embeddings.weight",
    "head.norm": "decoder.final_layernorm.weight",
    "head.weight": "output_layer.weight",
    "blocks.*.attention_norm": "decoder.layers.*.self_attention.linear_qkv.layer_norm_weight",
    "blocks.*.wq": "decoder.layers.*.self_attention.linear_qkv.weight",
    "blocks.*.wk": "decoder.layers.*.self_attention.linear_qkv.weight",
    "blocks.*.wv": "decoder.layers.*.self_attention.linear_qkv.weight",
    "blocks.*.wo": "decoder.layers.*.self_attention.linear_proj.weight",
    "blocks.*.bq": "decoder.layers.*.self_attention.linear_qkv.bias",
    "blocks.*.bk": "decoder.layers.*.self_attention.linear_qkv.bias",
    "blocks.*.bv": "decoder.layers.*.self_attention.linear_qkv.bias",
    "blocks.*.q_norm": "decoder.layers.*.self_attention.q_layernorm.weight",
    "blocks.*.k_norm": "decoder.layers.*.self_attention.k_layernorm.weight",
    "blocks.*.mlp_norm": "decoder.layers.*.mlp.linear_fc1.layer_norm_weight",
    "blocks.*.w_gate": "decoder.layers.*.mlp.linear_fc1.weight",
    "blocks.*.w_up": "decoder.layers.*.mlp.linear_fc1.weight",
    "blocks.*.w_down": "decoder.layers.*.mlp.linear_fc2.weight",
}
_WITHOUT_TRANSFORMER_ENGINE = _NAMES | {
    "blocks.*.attention_norm": "decoder.layers.*.input_layernorm.weight",
    "blocks.*.mlp_norm": "decoder.layers.*.pre_mlp_layernorm.weight",
}

# Fields that Megatron's arguments have under the same names, which are those of the flags.
_FIELDS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"),
    *("max_position_embeddings", "norm_epsilon", "init_method_std"),
    *("add_qkv_bias", "qk_layernorm", "use_rope_scaling", "rope_scaling_factor"),
    *("position_embedding_type", "yarn_rotary_scaling_factor", "yarn_beta_fast", "yarn_beta_slow"),
    *("yarn_original_max_position_embeddings", "yarn_correction_range_round_to_int"),
    *("yarn_mscale", "yarn_mscale_all_dim", "use_mup", "mup_base_hidden_size"),
    *("mup_embedding_mult", "mup_output_mult", "mup_base_head_dim", "mup_attn_scale_power"),
)
_ROTARY = ("rotary_base", "rotary_seq_len_interpolation_factor")  # whole numbers in Megatron
# Megatron's hard-coded values under --use-rope-scaling.
_ROPE_SCALING = {
    "rope_scaling_original_max_position_embeddings": 8192,
    "rope_scaling_low_freq_factor": 1.0,
    "rope_scaling_high_freq_factor": 4.0,
}
_FIXED = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "add_bias_linear": False,
    "apply_layernorm_1p": False,
    "window_size": None,
    "num_experts": None,
    "multi_latent_attention": False,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
}


class _Args(TypedDict):
    """Megatron's arguments that are read apart from the model's fields."""

    untie_embeddings_and_output_weights: bool
    group_query_attention: NotRequired[bool]
    tensor_model_parallel_size: NotRequired[Annotated[int, range(1, 1025)]]
    vocab_size: NotRequired[Count | None]
    tokenizer_type: NotRequired[str | None]


def megatron_name(name: str) -> str:
    """Return the name of the Megatron tensor that holds a parameter."""
    return name_in(_NAMES, name)


def is_megatron(root: Path) -> bool:
    """Return whether the folder is Megatron's; its tracker has the same name as ours."""
    return (root / TRACKER).is_file() and any(root.glob("*/mp_rank_*"))


def open_megatron(root: Path) -> Source:
    """Open a `--ckpt-format torch` checkpoint; `UserError` if it cannot be read."""
    path = _iteration(root) / FILE
    if not path.is_file():
        raise UserError(
            f"{path} is missing: only --ckpt-format torch without pipeline parallelism can be read"
        )
    args, first = _contents(path)
    num_ranks = args.get("tensor_model_parallel_size", 1)
    others = [path.parents[1] / f"mp_rank_{rank:02d}" / path.name for rank in range(1, num_ranks)]
    ranks = [first, *(_contents(other)[1] for other in others)]
    config, vocab_size = _config(path, args, ranks)
    found = _found(path, config, ranks)
    tensors = checked_tensors(parameter_shapes(config), found, path, megatron_name)
    companions = companions_in(root / COMPANIONS)
    # A tokenizer.model alone is from a folder of Meta's, whose texts begin with BOS.
    begins = {*companions} == {"tokenizer.model"} or begins_with_bos(companions)
    notes = () if companions else (f"{root} has no tokenizer: prompts are token ids",)
    return Source(
        config=replace(config, vocab_size=vocab_size),
        tensors=unpadded(tensors, vocab_size),
        companions=companions,
        tokenizer=tokenizer_of(companions, begins=begins),
        begins_with_bos=begins,
        notes=notes,
    )


def write_megatron(source: Source, root: Path, *, rows: int, divisible_by: int) -> None:
    """Fill an empty folder with a `release` checkpoint; embedding and head have `rows` rows."""
    config = replace(source.config, vocab_size=rows)
    for name in (*_ROTARY, *(_ROPE_SCALING if config.use_rope_scaling else ())):
        value = getattr(config, name)
        if value != _ROPE_SCALING.get(name, int(value)):
            raise UserError(
                f"Megatron-LM has no --{name.replace('_', '-')} {value}, as this model has: it "
                f"takes {_ROPE_SCALING.get(name, 'a whole number')}"
            )
    dtypes: dict[str, torch.dtype] = {}
    for name, tensor in source.tensors.items():
        theirs = megatron_name(name)
        # The type that holds all parts, so that none loses bits.
        dtypes[theirs] = torch.promote_types(dtypes.get(theirs, tensor.dtype), tensor.dtype)
    # Never written, so they take no memory; `skip_data` reserves their space in the file.
    room = {n: torch.empty(shape, dtype=dtypes[n]) for n, shape in _fused_shapes(config).items()}
    path = root / "release" / FILE
    path.parent.mkdir(parents=True)
    with skip_data():
        torch.save(_state(source, config, room, divisible_by), path)
    del room
    with fill_torch_file(path) as saved:
        for name, tensor in source.tensors.items():
            fused = saved["model"][megatron_name(name)]
            index = _rows_of(config, name, len(fused))
            for start, stop in tensor.row_ranges():
                fused[index[start:stop]] = tensor.rows(start, stop).to(fused.dtype)
    source.copy_companions(root / COMPANIONS)
    (root / TRACKER).write_text("release", encoding="utf-8")


def _iteration(root: Path) -> Path:
    tracker = root / TRACKER
    if not tracker.is_file():
        raise UserError(f"{root} holds no checkpoint of Megatron's: it has no {TRACKER}")
    text = read_bytes(tracker, max_bytes=MAX_TRACKER_BYTES).decode(errors="replace").strip()
    if text == "release":
        return root / text
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise UserError(f"{tracker} says {text[:40]!r} and names no iteration")
    return root / f"iter_{int(text):07d}"


def _contents(path: Path) -> tuple[_Args, Mapping[str, Any]]:
    """Return the arguments and tensors in a rank's file; `UserError` if it has none."""
    saved = load_torch_file(path)
    for name, kind in (("args", Namespace), ("model", dict)):
        if not isinstance(saved, dict) or not isinstance(saved.get(name), kind):
            raise UserError(f"{path} is no checkpoint of Megatron's: it has no {name}")
    args: _Args = conform(vars(saved["args"]), _Args, f"{path}: args")
    return args, saved["model"]


def _config(path: Path, args: _Args, ranks: Sequence[Mapping[str, Any]]) -> tuple[LlamaConfig, int]:
    """Return the model with padded vocabulary, and the size of the vocabulary without padding."""
    given: dict[str, Any] = {**args}
    for name, ours in _FIXED.items():
        theirs = given.get(name, ours)
        is_plain = theirs is None or isinstance(theirs, str | int | float)
        if not is_plain or theirs != ours:
            there = repr(theirs) if is_plain else f"a {type(theirs).__name__}"
            raise UserError(
                f"{path} is not of this architecture: {name} is {there} there, and must be {ours!r}"
            )
    stored = [rank.get("embedding.word_embeddings.weight") for rank in ranks]
    embeddings = [embedding for embedding in stored if is_weight(embedding)]
    if len(embeddings) != len(ranks):
        raise UserError(f"{path} has no embedding.word_embeddings.weight")
    is_used = {
        "rope_scaling_": given.get("use_rope_scaling"),
        "yarn_": given.get("position_embedding_type") == "yarn",
        "mup_": given.get("use_mup"),
    }
    unused = tuple(prefix for prefix in is_used if not is_used[prefix])
    names = [name for name in (*_FIELDS, *_ROTARY) if not name.startswith(unused)]
    fields = {name: given[name] for name in names if given.get(name) is not None}
    groups = "num_query_groups" if given.get("group_query_attention") else "num_attention_heads"
    if groups in given:
        fields["num_query_groups"] = given[groups]
    fields["vocab_size"] = sum(embedding.shape[0] for embedding in embeddings)
    tied = not args["untie_embeddings_and_output_weights"]
    fields["tie_embeddings_and_output_weights"] = tied
    config: LlamaConfig = conform(fields, LlamaConfig, f"{path}: args")
    if config.num_query_groups % len(ranks) or config.ffn_hidden_size % len(ranks):
        raise UserError(
            f"{path}: {len(ranks)} tensor-parallel ranks do not divide its "
            f"{config.num_query_groups} query groups"
        )
    vocab_size = args.get("vocab_size") or config.vocab_size
    is_null = given.get("tokenizer_type") == "NullTokenizer"
    if is_null and "null_tokenizer_eod_id" not in given:
        vocab_size += 1  # before core 0.18 the argument did not count the EOD token
    return config, min(vocab_size, config.vocab_size)


def _found(
    path: Path, config: LlamaConfig, ranks: Sequence[Mapping[str, Any]]
) -> dict[str, LazyTensor]:
    """Return the parameters as lazy slices of Megatron's tensors."""
    of_a_rank = replace(
        config,
        num_attention_heads=config.num_attention_heads // len(ranks),
        num_query_groups=config.num_query_groups // len(ranks),
        ffn_hidden_size=config.ffn_hidden_size // len(ranks),
        vocab_size=config.vocab_size // len(ranks),
    )
    shapes, dims = _fused_shapes(of_a_rank), cut_dims(config)
    found = {}
    for name in parameter_shapes(config):
        theirs, unfused = megatron_name(name), name_in(_WITHOUT_TRANSFORMER_ENGINE, name)
        tensors = [rank.get(theirs, rank.get(unfused)) for rank in ranks]
        if not all(map(is_weight, tensors)):
            continue
        for tensor in tensors:
            if tensor.shape != shapes[theirs]:
                raise UserError(
                    f"{path}: {theirs} is {tuple(tensor.shape)}, and its arguments make it "
                    f"{shapes[theirs]}"
                )
        parts = [lazy(tensor, _rows_of(of_a_rank, name, len(tensor))) for tensor in tensors]
        found[name] = joined(parts, dims.get(name))
    return found


def _fused_shapes(config: LlamaConfig) -> dict[str, Shape]:
    """Return the shapes of Megatron's tensors, whose rows are those of one or more parameters."""
    shapes: dict[str, Shape] = {}
    for name, (rows, *columns) in parameter_shapes(config).items():
        theirs = megatron_name(name)
        others = shapes[theirs][0] if theirs in shapes else 0
        shapes[theirs] = (others + rows, *columns)
    return shapes


def _rows_of(config: LlamaConfig, name: str, num_rows: int) -> Tensor:
    """Return the rows of Megatron's tensor, of `num_rows`, that are a parameter's, in order."""
    part = name.rpartition(".")[2]
    groups, head = config.num_query_groups, config.kv_channels
    if part in _BY_GROUP:
        sizes = (config.num_attention_heads // groups * head, head, head)
        by_group = torch.arange(groups * sum(sizes)).view(groups, -1)
        return by_group.split(sizes, 1)["qkv".index(part[1])].flatten()
    rows, ffn = torch.arange(num_rows), config.ffn_hidden_size
    return {"w_gate": rows[:ffn], "w_up": rows[ffn:]}.get(part, rows)


def _state(
    source: Source, config: LlamaConfig, room: Mapping[str, Tensor], divisible_by: int
) -> dict[str, Any]:
    """Return the contents of Megatron's file, with tensors of the right shape but no values."""
    dtype = next(iter(room.values())).dtype
    interpolation = int(config.rotary_seq_len_interpolation_factor)
    args = {
        **_FIXED,
        **{name: getattr(config, name) for name in _FIELDS},
        "group_query_attention": config.num_query_groups != config.num_attention_heads,
        "num_query_groups": config.num_query_groups,
        "rotary_base": int(config.rotary_base),
        "rotary_seq_len_interpolation_factor": None if interpolation == 1 else interpolation,
        "untie_embeddings_and_output_weights": not config.tie_embeddings_and_output_weights,
        "tensor_model_parallel_size": 1,
        "seq_length": config.max_position_embeddings,
        "vocab_size": source.config.vocab_size,
        "padded_vocab_size": config.vocab_size,
        "make_vocab_size_divisible_by": divisible_by,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "transformer_impl": "transformer_engine",
        "ckpt_format": "torch",
        "iteration": 0,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
    }
    return {"args": Namespace(**args), "checkpoint_version": 3.0, "iteration": 0, "model": {**room}}
