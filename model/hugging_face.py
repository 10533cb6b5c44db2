"""The same model as Hugging Face's transformers names it: its configuration and its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model.config import LlamaConfig
from model.rotary import HIGH_FREQUENCY_FACTOR, LOW_FREQUENCY_FACTOR, ORIGINAL_POSITIONS

_OUTSIDE_BLOCKS = {
    "embedding.weight": "model.embed_tokens.weight",
    "head.norm": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_INSIDE_A_BLOCK = {
    "attention_norm": "input_layernorm",
    "wq": "self_attn.q_proj",
    "wk": "self_attn.k_proj",
    "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "w_gate": "mlp.gate_proj",
    "w_up": "mlp.up_proj",
    "w_down": "mlp.down_proj",
}

# Of a config.json: what this model has no choice in, and what it must say.
_FIXED = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
}
_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}


def hugging_face_name(name: str) -> str:
    """What transformers calls a parameter; shapes and the order of channels are the same."""
    if name in _OUTSIDE_BLOCKS:
        return _OUTSIDE_BLOCKS[name]
    _, layer, part = name.split(".")
    return f"model.layers.{layer}.{_INSIDE_A_BLOCK[part]}.weight"


def hugging_face_config(config: LlamaConfig) -> dict[str, Any]:
    """The fields of transformers' LlamaConfig, as its config.json holds them."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rotary_base}
    if config.use_rope_scaling:
        rope |= {
            "rope_type": "llama3",
            "factor": config.rope_scaling_factor,
            "low_freq_factor": LOW_FREQUENCY_FACTOR,
            "high_freq_factor": HIGH_FREQUENCY_FACTOR,
            "original_max_position_embeddings": ORIGINAL_POSITIONS,
        }
    return {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_query_groups,
        "head_dim": config.kv_channels,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_epsilon,
        "initializer_range": config.init_method_std,
        "tie_word_embeddings": config.tie_embeddings_and_output_weights,
        "rope_parameters": rope,
    }


def llama_config(fields: Mapping[str, Any]) -> LlamaConfig:
    """The model that a config.json describes, whichever version of transformers wrote it.

    `ValueError` names the first field that makes it another model than this LLaMA.
    """
    for name, ours in _FIXED.items():
        theirs = fields.get(name, ours)
        if theirs != ours:
            raise ValueError(f"{name} is {theirs!r} there, and this model's is {ours!r}")
    for name in _SIZES.values():
        if not isinstance(fields.get(name), int):
            raise ValueError(f"{name} is {fields.get(name)!r} there and not a whole number")
    sizes = {own: fields[theirs] for own, theirs in _SIZES.items()}
    heads = sizes["num_attention_heads"]
    groups, head = fields.get("num_key_value_heads"), fields.get("head_dim")
    return LlamaConfig(
        **sizes,
        **_rope(fields),
        num_query_groups=heads if groups is None else groups,
        kv_channels=sizes["hidden_size"] // heads if head is None else head,
        norm_epsilon=fields.get("rms_norm_eps", 1e-6),
        max_position_embeddings=fields.get("max_position_embeddings", 2048),
        init_method_std=fields.get("initializer_range", 0.02),
        tie_embeddings_and_output_weights=fields.get("tie_word_embeddings", False),
    )


def _rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The rotation, from `rope_parameters`, or from `rope_theta` and `rope_scaling` of old."""
    rope = dict(fields.get("rope_scaling") or fields.get("rope_parameters") or {})
    base = float(rope.get("rope_theta", fields.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rotary_base": base}
    constants = {
        "rope_type": "llama3",
        "low_freq_factor": LOW_FREQUENCY_FACTOR,
        "high_freq_factor": HIGH_FREQUENCY_FACTOR,
        "original_max_position_embeddings": ORIGINAL_POSITIONS,
    }
    for name, ours in constants.items():
        theirs = kind if name == "rope_type" else rope.get(name)
        if theirs != ours:
            raise ValueError(f"{name} is {theirs!r} there, and this model's is {ours!r}")
    factor = float(rope["factor"])
    return {"rotary_base": base, "use_rope_scaling": True, "rope_scaling_factor": factor}
