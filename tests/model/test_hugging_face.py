"""config.json there and back: every preset, every version, and fields that make another model."""

from __future__ import annotations

from typing import Any

import pytest

from model.config import LLAMA_PRESETS, LlamaConfig
from model.hugging_face import hugging_face_config, llama_config


@pytest.mark.parametrize("config", LLAMA_PRESETS.values(), ids=LLAMA_PRESETS.keys())
def test_presets_come_back(config: LlamaConfig) -> None:
    fields = hugging_face_config(config)
    assert llama_config(fields) == config
    rope = fields.pop("rope_parameters")  # as transformers 4 wrote it
    fields["rope_theta"] = rope.pop("rope_theta")
    fields["rope_scaling"] = rope if config.use_rope_scaling else None
    assert llama_config(fields) == config


def test_what_is_left_out_is_as_transformers_takes_it() -> None:
    from transformers import LlamaConfig as HuggingFaceConfig

    fields = {
        "num_hidden_layers": 3,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 70,
    }
    whole = HuggingFaceConfig(**fields).to_dict()
    assert llama_config(fields) == llama_config(whole)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "mistral"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("num_hidden_layers", None),
        ("vocab_size", "many"),
    ],
)
def test_another_model_is_named_by_its_field(field: str, value: Any) -> None:
    fields = hugging_face_config(LLAMA_PRESETS["7B"]) | {field: value}
    with pytest.raises(ValueError, match=f"^{field} is {value!r} there"):
        llama_config(fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_type", "yarn"),
        ("low_freq_factor", 2.0),
        ("high_freq_factor", 8.0),
        ("original_max_position_embeddings", 4096),
    ],
)
def test_another_rotation_is_named_by_its_field(field: str, value: Any) -> None:
    fields = hugging_face_config(LLAMA_PRESETS["llama3.1-8B"])
    fields["rope_parameters"][field] = value
    with pytest.raises(ValueError, match=f"^{field} is {value!r} there"):
        llama_config(fields)
