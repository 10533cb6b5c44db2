"""config.json in both directions: every preset, every version, and unsupported fields."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from model.config import LLAMA_PRESETS, LlamaConfig
from model.hugging_face import hugging_face_config, llama_config
from paro.errors import UserError


@pytest.mark.parametrize("config", LLAMA_PRESETS.values(), ids=LLAMA_PRESETS.keys())
def test_presets_come_back(config: LlamaConfig) -> None:
    fields = hugging_face_config(config)
    assert llama_config(fields) == config
    rope = fields.pop("rope_parameters")  # as transformers 4 wrote it
    fields["rope_theta"] = rope.pop("rope_theta")
    fields["rope_scaling"] = rope if config.use_rope_scaling else None
    assert llama_config(fields) == config


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_is_left_out_is_as_transformers_takes_it(model_type: str) -> None:
    from transformers import AutoConfig

    fields: dict[str, Any] = {
        "model_type": model_type,
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 32,
        "vocab_size": 70,
    }
    if model_type == "mistral":
        fields["sliding_window"] = None
    whole = AutoConfig.for_model(**fields).to_dict()
    assert llama_config(fields) == llama_config(whole)


def test_mistral_without_a_window_is_llama() -> None:
    fields = hugging_face_config(LLAMA_PRESETS["mistral-7B"])
    assert fields["model_type"] == "llama"
    mistral = fields | {"model_type": "mistral", "sliding_window": None}
    assert llama_config(mistral) == LLAMA_PRESETS["mistral-7B"]
    for windowed in (mistral | {"sliding_window": 4096}, fields | {"model_type": "mistral"}):
        with pytest.raises(UserError, match=r"^sliding_window is 4096 there .* within a window"):
            llama_config(windowed)


def test_a_window_of_qwen_counts_where_it_is_switched_on() -> None:
    fields = hugging_face_config(LLAMA_PRESETS["qwen3-8B"]) | {"sliding_window": 4096}
    assert llama_config(fields) == LLAMA_PRESETS["qwen3-8B"]
    with pytest.raises(UserError, match=r"^sliding_window is 4096 there"):
        llama_config(fields | {"use_sliding_window": True})
    with pytest.raises(UserError, match=r"^layer_types has 'sliding_attention'"):
        llama_config(fields | {"layer_types": ["full_attention", "sliding_attention"]})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_hidden_layers", None, "None is of the wrong type, it must be a whole number"),
        ("vocab_size", "many", "'many' is of the wrong type, it must be a whole number"),
        ("model_type", [], r"\[\] is of the wrong type, it must be text"),
        ("rope_parameters", {"rope_type": 3}, "^rope_parameters.rope_type: 3 is of the wrong type"),
        ("rope_parameters", {"rope_type": "llama3"}, "factor: is missing"),
        ("layer_types", [7], r"^layer_types\[0\]: 7 is of the wrong type"),
    ],
)
def test_a_wrong_field_is_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        llama_config(hugging_face_config(LLAMA_PRESETS["7B"]) | {field: value})


def test_what_no_architecture_has_is_said() -> None:
    config = replace(LLAMA_PRESETS["qwen3-8B"], add_qkv_bias=True)
    with pytest.raises(UserError, match="both --add-qkv-bias and --qk-layernorm"):
        hugging_face_config(config)


@pytest.mark.parametrize(
    ("preset", "field", "value", "feature"),
    [
        ("7B", "hidden_act", "gelu", "activation"),
        ("7B", "attention_bias", True, "output projection"),
        ("qwen3-8B", "attention_bias", True, "output projection"),
        ("7B", "mlp_bias", True, "biases in its MLPs"),
        ("7B", "partial_rotary_factor", 0.5, "rotated in part"),
        ("7B", "quantization_config", {"bits": 4}, "quantized"),
        ("7B", "model_type", "gemma", r"1 \+ weight"),
        ("7B", "model_type", "mixtral", "experts"),
        ("7B", "model_type", "unheard", "has to be one of .*'qwen3'"),
    ],
)
def test_another_model_is_named_by_its_feature(
    preset: str, field: str, value: Any, feature: str
) -> None:
    fields = hugging_face_config(LLAMA_PRESETS[preset]) | {field: value}
    with pytest.raises(UserError, match=f"^{field} is {re.escape(repr(value))} there.*{feature}"):
        llama_config(fields)


def test_another_rotation_is_named() -> None:
    fields = hugging_face_config(LLAMA_PRESETS["llama3.1-8B"])
    fields["rope_parameters"]["rope_type"] = "yarn"
    with pytest.raises(UserError, match=r"^rope_type is 'yarn' there"):
        llama_config(fields)
    fields = hugging_face_config(LLAMA_PRESETS["7B"])
    fields["rope_parameters"]["partial_rotary_factor"] = 0.5
    with pytest.raises(UserError, match=r"^partial_rotary_factor is 0\.5 there"):
        llama_config(fields)


def test_any_original_length_and_factors_come_back() -> None:
    config = replace(
        LLAMA_PRESETS["llama3.1-8B"],
        rope_scaling_original_max_position_embeddings=4096,
        rope_scaling_low_freq_factor=2.0,
        rope_scaling_high_freq_factor=8.0,
    )
    assert llama_config(hugging_face_config(config)) == config
