"""Conversion of model configuration and parameter names to and from Hugging Face transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

from model.config import LlamaConfig
from model.units import name_in
from paro.errors import UserError
from paro.files.schema import Positive, conform

_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "head.norm": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "blocks.*.attention_norm": "model.layers.*.input_layernorm.weight",
    "blocks.*.wq": "model.layers.*.self_attn.q_proj.weight",
    "blocks.*.wk": "model.layers.*.self_attn.k_proj.weight",
    "blocks.*.wv": "model.layers.*.self_attn.v_proj.weight",
    "blocks.*.wo": "model.layers.*.self_attn.o_proj.weight",
    "blocks.*.bq": "model.layers.*.self_attn.q_proj.bias",
    "blocks.*.bk": "model.layers.*.self_attn.k_proj.bias",
    "blocks.*.bv": "model.layers.*.self_attn.v_proj.bias",
    "blocks.*.q_norm": "model.layers.*.self_attn.q_norm.weight",
    "blocks.*.k_norm": "model.layers.*.self_attn.k_norm.weight",
    "blocks.*.mlp_norm": "model.layers.*.post_attention_layernorm.weight",
    "blocks.*.w_gate": "model.layers.*.mlp.gate_proj.weight",
    "blocks.*.w_up": "model.layers.*.mlp.up_proj.weight",
    "blocks.*.w_down": "model.layers.*.mlp.down_proj.weight",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """The features and defaults of a transformers model_type that this model can represent."""

    add_qkv_bias: bool = False
    has_attention_bias: bool = False  # True: attention_bias adds biases to q, k, v and output
    qk_layernorm: bool = False
    says: Mapping[str, Any] = field(default_factory=dict)  # further fields written to config.json
    # Defaults of transformers for fields that a config.json leaves out.
    num_key_value_heads: int | None = None  # default; None: num_attention_heads
    head_dim: int | None = None  # default; None: hidden_size / num_attention_heads
    max_position_embeddings: int = 2048
    sliding_window: int | None = None


_FAMILIES = {
    "llama": _Family(has_attention_bias=True, says={"mlp_bias": False}),
    "mistral": _Family(num_key_value_heads=8, max_position_embeddings=131072, sliding_window=4096),
    "qwen2": _Family(
        add_qkv_bias=True,
        says={"use_sliding_window": False},
        num_key_value_heads=32,
        max_position_embeddings=32768,
    ),
    "qwen3": _Family(
        has_attention_bias=True,
        qk_layernorm=True,
        says={"use_sliding_window": False},
        num_key_value_heads=32,
        head_dim=128,
        max_position_embeddings=32768,
    ),
}

# Parts of the names of model types with gated MLPs that are not supported, and why.
_EXPERTS = "its MLPs are mixtures of experts (MoE)"
_LAYER_NORM = "its norms are LayerNorm"
_OTHERS = {
    "gemma": "its norms multiply by 1 + weight, its embeddings are scaled, and its gate is GELU",
    **dict.fromkeys(("moe", "mixtral", "gpt_oss", "llama4", "deepseek", "qwen3_next"), _EXPERTS),
    **dict.fromkeys(("cohere", "stablelm", "starcoder", "nemotron"), _LAYER_NORM),
}

# Fields that must have this value in every family; any other value is another architecture.
_FIXED: dict[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "the activation of its gate"),
    "mlp_bias": (False, "biases in its MLPs"),
    "partial_rotary_factor": (1.0, "heads that are rotated in part"),
    "quantization_config": (None, "quantized weights"),
    "per_layer_config": (None, "layers that differ"),
    "transformers_weights": (None, "weights in a file of another name"),
}
_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}
# Fields of scaled positions, here and in transformers, by the rope_type.
_SCALED = {
    "linear": {"rotary_seq_len_interpolation_factor": "factor"},
    "llama3": {
        "rope_scaling_factor": "factor",
        "rope_scaling_original_max_position_embeddings": "original_max_position_embeddings",
        "rope_scaling_low_freq_factor": "low_freq_factor",
        "rope_scaling_high_freq_factor": "high_freq_factor",
    },
    "yarn": {
        "yarn_rotary_scaling_factor": "factor",
        "yarn_original_max_position_embeddings": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
        "yarn_correction_range_round_to_int": "truncate",
    },
}

# What transformers can scale positions by; with factor 1 none of them does.
_SCALINGS = ("linear", "dynamic", "yarn", "longrope", "proportional", "llama3")


class _Rope(TypedDict, total=False):
    """Fields of all rope_types."""

    rope_theta: float
    rope_type: str
    type: str
    factor: float | None
    original_max_position_embeddings: Positive
    low_freq_factor: float
    high_freq_factor: float
    attention_factor: float | None  # yarn and longrope: factor on queries and keys
    mscale: float | None
    mscale_all_dim: float | None
    beta_fast: float | None
    beta_slow: float | None
    truncate: bool
    short_factor: list[float] | None  # longrope: a factor for each pair of channels
    long_factor: list[float] | None


class _Fields(TypedDict):
    """Fields of config.json that are read."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: Positive
    vocab_size: int
    num_key_value_heads: NotRequired[int | None]
    head_dim: NotRequired[int | None]
    rms_norm_eps: NotRequired[float]
    max_position_embeddings: NotRequired[Positive]
    initializer_range: NotRequired[float]
    attention_bias: NotRequired[bool]
    tie_word_embeddings: NotRequired[bool]
    rope_theta: NotRequired[float]
    rope_parameters: NotRequired[_Rope | None]
    rope_scaling: NotRequired[_Rope | None]
    original_max_position_embeddings: NotRequired[Positive]
    layer_types: NotRequired[list[str] | None]


def hugging_face_name(name: str) -> str:
    """Return a parameter's name in transformers, whose shapes and channel order are equal."""
    return name_in(_NAMES, name)


def hugging_face_config(config: LlamaConfig) -> dict[str, Any]:
    """Return the config.json of the family that fits this model; `UserError` if none does."""
    if config.use_mup:
        raise UserError(
            "transformers' models have none of the factors of --use-mup: it cannot be written for "
            "them, for Megatron-LM it can"
        )
    model_type = "llama"
    if config.add_qkv_bias or config.qk_layernorm:
        model_type = "qwen3" if config.qk_layernorm else "qwen2"
    family = _FAMILIES[model_type]
    says = dict(family.says)
    if family.has_attention_bias:
        says["attention_bias"] = config.add_qkv_bias
    rope: dict[str, Any] = {}
    for kind, is_used in (
        ("llama3", config.use_rope_scaling),
        ("yarn", config.position_embedding_type == "yarn"),
        ("linear", config.rotary_seq_len_interpolation_factor != 1.0),
    ):
        if is_used and rope:
            raise UserError(
                f"transformers has no model with both rope_type {rope['rope_type']} and "
                "--rotary-seq-len-interpolation-factor: it cannot be written for it"
            )
        if is_used:
            scaled = {theirs: getattr(config, ours) for ours, theirs in _SCALED[kind].items()}
            rope = {"rope_type": kind, **scaled}
    if config.position_embedding_type == "yarn":
        rope["attention_factor"] = config.rotary_scale
    return {
        "architectures": [f"{model_type.capitalize()}ForCausalLM"],
        "model_type": model_type,
        "hidden_act": "silu",
        **says,
        **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
        "num_key_value_heads": config.num_query_groups,
        "head_dim": config.kv_channels,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_epsilon,
        "initializer_range": config.init_method_std,
        "tie_word_embeddings": config.tie_embeddings_and_output_weights,
        # The form of transformers 4, which transformers 5 reads too.
        "rope_theta": config.rotary_base,
        "rope_scaling": rope or None,
    }


def output_biases(fields: Mapping[str, Any]) -> list[str]:
    """Return biases that transformers' model of this config.json has and this one has not."""
    is_there = _FAMILIES[fields.get("model_type", "llama")].has_attention_bias
    layers = range(fields["num_hidden_layers"] if is_there and fields.get("attention_bias") else 0)
    return [f"model.layers.{layer}.self_attn.o_proj.bias" for layer in layers]


def llama_config(fields: Mapping[str, Any]) -> LlamaConfig:
    """Return the model that a config.json of any version of transformers describes.

    `UserError` names the first feature that this model does not support. Biases on attention's
    output projection, see `output_biases`, have to be zero.
    """
    family = _family(str(fields.get("model_type", "llama")))
    fields = conform(dict(fields), _Fields, "")
    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    for name, (ours, meaning) in _FIXED.items():
        theirs = rope.get(name, fields.get(name, ours))
        if theirs != ours:
            raise UserError(f"{name} is {theirs!r} there and has to be {ours!r} ({meaning})")
    _check_window(fields, family)
    sizes = {ours: fields[theirs] for ours, theirs in _SIZES.items()}
    heads = sizes["num_attention_heads"]
    groups = fields.get("num_key_value_heads", family.num_key_value_heads)
    head = fields.get("head_dim", family.head_dim)
    longest = fields.get("max_position_embeddings", family.max_position_embeddings)
    return LlamaConfig(
        **sizes,
        **_rope(fields, rope, longest),
        num_query_groups=heads if groups is None else groups,
        kv_channels=sizes["hidden_size"] // heads if head is None else head,
        add_qkv_bias=family.add_qkv_bias or bool(output_biases(fields)),
        qk_layernorm=family.qk_layernorm,
        norm_epsilon=fields.get("rms_norm_eps", 1e-6),
        max_position_embeddings=longest,
        init_method_std=fields.get("initializer_range", 0.02),
        tie_embeddings_and_output_weights=fields.get("tie_word_embeddings", False),
    )


def _family(model_type: str) -> _Family:
    if model_type in _FAMILIES:
        return _FAMILIES[model_type]
    why = next((reason for part, reason in _OTHERS.items() if part in model_type), None)
    raise UserError(
        f"model_type is {model_type!r} there, "
        + (f"which is another model: {why}" if why else f"and has to be one of {[*_FAMILIES]}")
    )


def _check_window(fields: Mapping[str, Any], family: _Family) -> None:
    """Raise `UserError` for sliding-window attention."""
    window = fields.get("sliding_window", family.sliding_window)
    # Without use_sliding_window a given window is ignored by every family but Mistral.
    if window is not None and fields.get("use_sliding_window", family.sliding_window is not None):
        raise UserError(f"sliding_window is {window!r} there and has to be null (local attention)")
    others = sorted(set(fields.get("layer_types") or ()) - {"full_attention"})
    if others:
        raise UserError(f"layer_types has {others[0]!r} and may have full_attention alone")


def _rope(fields: Mapping[str, Any], rope: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """Return the RoPE fields, from `rope_parameters` or the older `rope_theta` and `rope_scaling`.

    `longest`: the longest sequence, which LLaMA-3.1's scaling stretches if no other is stated.
    """
    if "full_attention" in rope:
        raise UserError("rope_parameters are given by type of layer there, and have to be flat")
    base = float(rope.get("rope_theta", fields.get("rope_theta", 10000.0)))
    rope_fields: dict[str, Any] = {"rotary_base": base}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default" or (kind in _SCALINGS and _scales_nothing(rope)):
        return rope_fields
    if kind not in _SCALED:
        raise UserError(
            f"rope_type is {kind!r} there and has to be default, linear, llama3 or yarn, or its "
            "factor 1 (scaled positions)"
        )
    original = "original_max_position_embeddings"
    stretched = {original: longest, **rope}
    if original in fields:  # which has priority in transformers
        stretched[original] = fields[original]
    if kind == "yarn":
        return rope_fields | _yarn_fields(stretched, longest)
    for name in _SCALED[kind].values():
        if stretched.get(name) is None:
            raise UserError(f"{name}: is missing")
    factors = {ours: stretched[theirs] for ours, theirs in _SCALED[kind].items()}
    return rope_fields | {"use_rope_scaling": kind == "llama3", **factors}


def _yarn_fields(scaling: dict[str, Any], longest: int) -> dict[str, Any]:
    """Return the RoPE fields of YaRN, with transformers' defaults for null or missing ones."""
    factor = scaling.get("factor")
    if factor is None:
        factor = scaling["factor"] = longest / scaling["original_max_position_embeddings"]
    given = {ours: scaling.get(theirs) for ours, theirs in _SCALED["yarn"].items()}
    yarn = {ours: value for ours, value in given.items() if value is not None}
    scale, log = scaling.get("attention_factor"), 0.1 * math.log(max(1.0, factor))
    mscales = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if scale is None and all(mscales):
        yarn["yarn_mscale"], yarn["yarn_mscale_all_dim"] = mscales
    elif scale is not None and not math.isclose(scale, 1.0 + log, rel_tol=1e-9):
        if not log or scale <= 0.0:
            allowed = "positive" if log else "1 with factor 1"
            raise UserError(f"attention_factor is {scale} there and has to be {allowed}")
        yarn["yarn_mscale"], yarn["yarn_mscale_all_dim"] = (scale - 1.0) / log, 0.0
    return {"position_embedding_type": "yarn", **yarn}


def _scales_nothing(rope: Mapping[str, Any]) -> bool:
    by_channels = [*(rope.get("short_factor") or ()), *(rope.get("long_factor") or ())]
    factors = rope.get("factor"), rope.get("attention_factor") or 1, *by_channels
    return all(factor == 1 for factor in factors)
