"""Megatron-core's GPT model: names of its tensors, how it fuses parameters, and its arguments."""

# Megatron-core's GPT model fuses tensors that this project keeps separate. Weights and biases have,
# per query group, the query heads, then the key head, then the value head:
#
#     linear_qkv.weight     q q q q k v | q q q q k v | ...      linear_fc1.weight     gate, up
#
# This is the whole model, as `torch_dist` stores it. Tensor parallelism splits all tensors but
# norms; a rank's linear_fc1 has its own part of gate, then of up. Norms have two names:
# Transformer Engine fuses them into the linear layer after them.

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import torch
from torch import Tensor

from model.config import LlamaConfig
from model.units import name_in, parameter_shapes
from paro.checkpoint.convert.source import LazyTensor, checked_tensors, joined, picked
from paro.errors import UserError, flag_of
from paro.files.schema import Count, conform
from paro.layout import Shape

EMBEDDING = "embedding.word_embeddings.weight"
_QKV = "decoder.layers.*.self_attention.linear_qkv"
_FC1 = "decoder.layers.*.mlp.linear_fc1"
NUMBERED = re.compile(r"(decoder\.layers\.)([0-9]{1,8})\.")  # the beginning of a layer's names
_BY_GROUP = ("wq", "wk", "wv", "bq", "bk", "bv")

_NAMES = {
    "embedding.weight": EMBEDDING,
    "head.norm": "decoder.final_layernorm.weight",
    "head.weight": "output_layer.weight",
    "blocks.*.attention_norm": f"{_QKV}.layer_norm_weight",
    **dict.fromkeys(("blocks.*.wq", "blocks.*.wk", "blocks.*.wv"), f"{_QKV}.weight"),
    "blocks.*.wo": "decoder.layers.*.self_attention.linear_proj.weight",
    **dict.fromkeys(("blocks.*.bq", "blocks.*.bk", "blocks.*.bv"), f"{_QKV}.bias"),
    "blocks.*.q_norm": "decoder.layers.*.self_attention.q_layernorm.weight",
    "blocks.*.k_norm": "decoder.layers.*.self_attention.k_layernorm.weight",
    "blocks.*.mlp_norm": f"{_FC1}.layer_norm_weight",
    **dict.fromkeys(("blocks.*.w_gate", "blocks.*.w_up"), f"{_FC1}.weight"),
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
    "mtp_num_layers": None,
    "expert_model_parallel_size": 1,
    "apply_residual_connection_post_layernorm": False,
    "qk_l2_norm": False,
    "no_rope_freq": None,
    "softmax_type": "vanilla",
    "attention_output_gate": False,
    "experimental_attention_variant": None,
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "heterogeneous_layers_config_path": None,
    "heterogeneous_layers_config_encoded_json": None,
}


class MegatronArgs(TypedDict):
    """Megatron's arguments that are read apart from the model's fields."""

    untie_embeddings_and_output_weights: bool
    group_query_attention: NotRequired[bool]
    tensor_model_parallel_size: NotRequired[Annotated[int, range(1, 1025)]]
    pipeline_model_parallel_size: NotRequired[Annotated[int, range(1, 1025)]]
    vocab_size: NotRequired[Count | None]
    tokenizer_type: NotRequired[str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronModel:
    """The tensors of a whole model, by Megatron's names, and its arguments in the file `path`."""

    path: Path
    args: MegatronArgs
    tensors: Mapping[str, LazyTensor]  # with the optimizer its masters
    # The optimizer's moments by their kind and Megatron's names, and a run's progress.
    moments: Mapping[str, Mapping[str, LazyTensor]] = field(default_factory=dict)
    progress: Mapping[str, Any] = field(default_factory=dict)


def megatron_name(name: str) -> str:
    """Return the name of the Megatron tensor that holds a parameter."""
    return name_in(_NAMES, name)


def args_in(saved: object, path: Path) -> MegatronArgs:
    """Return the arguments in the contents of a file; `UserError` if it has none."""
    if not isinstance(saved, dict) or not isinstance(saved.get("args"), Namespace):
        raise UserError(f"{path} is no checkpoint of Megatron's: it has no args")
    args: MegatronArgs = conform(vars(saved["args"]), MegatronArgs, f"{path}: args")
    return args


def config_of(model: MegatronModel) -> tuple[LlamaConfig, int]:
    """Return the model with padded vocabulary, and the size of the vocabulary without padding."""
    path, args = model.path, model.args
    flags: dict[str, Any] = {**args}
    for name, ours in _FIXED.items():
        theirs = flags.get(name, ours)
        is_plain = theirs is None or isinstance(theirs, str | int | float)
        if not is_plain or theirs != ours:
            there = repr(theirs) if is_plain else f"a {type(theirs).__name__}"
            raise UserError(
                f"{path} is not of this architecture: {name} is {there} there, and must be {ours!r}"
            )
    if EMBEDDING not in model.tensors:
        raise UserError(f"{path} has no {EMBEDDING}")
    is_used = {
        "rope_scaling_": flags.get("use_rope_scaling"),
        "yarn_": flags.get("position_embedding_type") == "yarn",
        "mup_": flags.get("use_mup"),
    }
    unused = tuple(prefix for prefix in is_used if not is_used[prefix])
    names = [name for name in (*_FIELDS, *_ROTARY) if not name.startswith(unused)]
    fields = {name: flags[name] for name in names if flags.get(name) is not None}
    groups = "num_query_groups" if flags.get("group_query_attention") else "num_attention_heads"
    if groups in flags:
        fields["num_query_groups"] = flags[groups]
    fields["vocab_size"] = model.tensors[EMBEDDING].shape[0]
    tied = not args["untie_embeddings_and_output_weights"]
    fields["tie_embeddings_and_output_weights"] = tied
    config: LlamaConfig = conform(fields, LlamaConfig, f"{path}: args")
    vocab_size = args.get("vocab_size") or config.vocab_size
    is_null = flags.get("tokenizer_type") == "NullTokenizer"
    if is_null and "null_tokenizer_eod_id" not in flags:
        vocab_size += 1  # before core 0.18 the argument did not count the EOD token
    return config, min(vocab_size, config.vocab_size)


def unfused(
    config: LlamaConfig, tensors: Mapping[str, LazyTensor], path: Path, prefix: str = ""
) -> dict[str, LazyTensor]:
    """Return the parameters, as rows of Megatron's tensors in the file `path`.

    `UserError` for a tensor that is missing or of another shape, or that the model does not have,
    such as a bias or one more layer. Names of tensors begin with `prefix` in the file.
    """
    shapes, names = _fused_shapes(config), [*parameter_shapes(config)]
    of_norms = {name_in(_WITHOUT_TRANSFORMER_ENGINE, name): megatron_name(name) for name in names}
    stored = {of_norms.get(name, name): tensor for name, tensor in tensors.items()}
    known = {*shapes, megatron_name("head.weight")}  # the last stage has a copy of a tied one
    if others := [name for name in stored if name not in known]:
        raise UserError(
            f"{path}: the model has {others[0]:.99}, and by its arguments it has no such tensor: "
            "it is of another architecture"
        )
    whole = checked_tensors(shapes, stored, path, f"{prefix}{{}}".format)
    return {
        name: picked(whole[theirs], _rows_of(config, name, shapes[theirs][0]))
        for name, theirs in zip(names, map(megatron_name, names), strict=True)
    }


def fused(config: LlamaConfig, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return Megatron's tensors, made of parameters; each has the type that loses no part's bits.

    The inverse of `unfused`.
    """
    parts: dict[str, list[str]] = {}
    for name in tensors:
        parts.setdefault(megatron_name(name), []).append(name)
    whole = {}
    for theirs, names in parts.items():
        dtype = reduce(torch.promote_types, (tensors[name].dtype for name in names))
        of_type = [
            t if t.dtype == dtype else t.cast(dtype) for t in map(tensors.__getitem__, names)
        ]
        rows = joined(of_type, 0)
        index = torch.cat([_rows_of(config, name, rows.shape[0]) for name in names])
        whole[theirs] = picked(rows, index.argsort())
    return whole


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


def written_args(
    config: LlamaConfig, vocab_size: int, dtype: torch.dtype, divisible_by: int
) -> Namespace:
    """Return Megatron's arguments for a model with padded vocabulary; `UserError` if it has none.

    `vocab_size` is the size of the vocabulary without padding.
    """
    for name in (*_ROTARY, *(_ROPE_SCALING if config.use_rope_scaling else ())):
        value = getattr(config, name)
        if value != _ROPE_SCALING.get(name, int(value)):
            raise UserError(
                f"Megatron-LM has no {flag_of(name)} {value}, as this model has: it "
                f"takes {_ROPE_SCALING.get(name, 'a whole number')}"
            )
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
        "pipeline_model_parallel_size": 1,
        "seq_length": config.max_position_embeddings,
        "vocab_size": vocab_size,
        "padded_vocab_size": config.vocab_size,
        "make_vocab_size_divisible_by": divisible_by,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "transformer_impl": "transformer_engine",
        "iteration": 0,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
    }
    return Namespace(**args)
