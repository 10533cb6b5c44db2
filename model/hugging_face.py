"""The same model as Hugging Face's transformers names it: its configuration and its parameters."""

from __future__ import annotations

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
