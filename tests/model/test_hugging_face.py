"""config.json in both directions: every preset, every version, and unsupported fields."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from model.config import LLAMA_PRESETS, LlamaConfig
from model.hugging_face import _FIXED, _Fields, hugging_face_config, llama_config, output_biases
from model.rotary import inverse_frequencies
from paro.checkpoint.convert.hugging_face import TOKEN_IDS
from tests.helpers.house import ROOT
from tests.helpers.refusals import refused

OTHER_SCALING = replace(
    LLAMA_PRESETS["llama3.1-8B"],
    rope_scaling_original_max_position_embeddings=4096,
    rope_scaling_low_freq_factor=2.0,
    rope_scaling_high_freq_factor=8.0,
)
YARN = replace(
    LLAMA_PRESETS["qwen3-8B"],
    position_embedding_type="yarn",
    yarn_rotary_scaling_factor=4.0,
    yarn_original_max_position_embeddings=32768,
    yarn_correction_range_round_to_int=False,
)


@pytest.mark.parametrize("config", [*LLAMA_PRESETS.values(), OTHER_SCALING, YARN])
def test_configurations_come_back(config: LlamaConfig) -> None:
    fields = hugging_face_config(config)
    assert llama_config(fields) == config
    scaling = fields.pop("rope_scaling") or {"rope_type": "default"}
    fields["rope_parameters"] = {"rope_theta": fields.pop("rope_theta"), **scaling}
    assert llama_config(fields) == config  # as transformers 5 writes it


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_is_left_out_is_as_transformers_takes_it(model_type: str) -> None:
    from transformers import AutoConfig

    fields: dict[str, Any] = {"model_type": model_type, "num_hidden_layers": 3, "vocab_size": 70}
    fields |= {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 32}
    if model_type == "mistral":
        fields["sliding_window"] = None
    whole = AutoConfig.for_model(**fields).to_dict()
    assert llama_config(fields) == llama_config(whole)


def test_a_window_counts_where_it_is_switched_on() -> None:
    fields = hugging_face_config(LLAMA_PRESETS["mistral-7B"])
    assert fields["model_type"] == "llama"
    mistral = fields | {"model_type": "mistral", "sliding_window": None}
    assert llama_config(mistral) == LLAMA_PRESETS["mistral-7B"]
    for windowed in (mistral | {"sliding_window": 4096}, fields | {"model_type": "mistral"}):
        refused(partial(llama_config, windowed), "sliding_window is 4096 there")
    fields = hugging_face_config(LLAMA_PRESETS["qwen3-8B"]) | {"sliding_window": 4096}
    assert llama_config(fields) == LLAMA_PRESETS["qwen3-8B"]
    kinds = ["full_attention", "sliding_attention"]
    for more, message in (
        ({"use_sliding_window": True}, "sliding_window is 4096 there"),
        ({"layer_types": kinds}, "layer_types ... 'sliding_attention'"),
    ):
        refused(partial(llama_config, fields | more), message)


ROTATIONS = [
    ({"rope_type": 3}, "rope_parameters.rope_type: 3 is of the wrong type"),
    ({"rope_type": "dynamic", "factor": 2.0}, "rope_type is 'dynamic' there ... llama3 or yarn"),
    ({"rope_type": "yarn", "factor": 1.0, "attention_factor": 2.0}, "attention_factor is 2.0"),
    ({"rope_type": "yarn", "factor": 0.5}, "--yarn-rotary-scaling-factor 0.5"),
    ({"rope_type": "yarn", "factor": 4.0, "beta_slow": 40}, "--yarn-beta-slow 40"),
    *(
        ({"rope_type": "yarn", "original_max_position_embeddings": original}, f"{original} is")
        for original in (0, None, [1])
    ),
    ({"rope_type": "mrope", "factor": 1.0}, "rope_type is 'mrope' there"),
    ({"rope_type": "linear"}, "factor: is missing"),
    ({"rope_type": "linear", "factor": 0.0}, "--rotary-seq-len-interpolation-factor 0.0"),
    ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5 there"),
    ({"full_attention": {"rope_theta": 5e5}}, "by type of layer"),
]


def test_a_field_that_is_wrong_or_of_another_model_is_named() -> None:
    for field, value, message in (
        ("vocab_size", "many", "vocab_size: 'many' ... a whole number"),
        ("model_type", [], "model_type is ... there ... has to be one of"),
        ("layer_types", [7], "layer_types[0]: 7 is of the wrong type"),
        *(("rope_parameters", scaling, message) for scaling, message in ROTATIONS),
        ("mlp_bias", True, "mlp_bias is True there ... biases in its MLPs"),
        ("quantization_config", {"bits": 4}, "quantization_config is {'bits': 4} ... quantized"),
        ("transformers_weights", "x", "transformers_weights is ... file of another name"),
        ("model_type", "gemma", "model_type is 'gemma' there ... 1 + weight"),
        ("model_type", "unheard", "model_type is 'unheard' there ... has to be one of ... 'qwen3'"),
    ):
        fields = hugging_face_config(LLAMA_PRESETS["7B"]) | {field: value}
        refused(partial(llama_config, fields), message)


def test_what_no_architecture_has_is_said() -> None:
    config = replace(LLAMA_PRESETS["llama3.1-8B"], rotary_seq_len_interpolation_factor=4.0)
    both = "both rope_type llama3 and --rotary-seq-len-interpolation-factor"
    refused(lambda: hugging_face_config(config), both)
    refused(lambda: hugging_face_config(replace(config, use_mup=True)), "--use-mup")


def test_the_page_tells_of_every_field_that_is_read() -> None:
    page = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    table = page.split("| field of `config.json` |")[1].split("| tensor |")[0]
    fields = {*_Fields.__annotations__, *_FIXED, *TOKEN_IDS, "model_type", "dtype"}
    assert {name for name in fields if f"`{name}`" not in table} == set()


@pytest.mark.parametrize("preset", ["7B", "qwen3-8B"])
def test_biases_of_attention_are_those_of_queries_keys_and_values(preset: str) -> None:
    fields = hugging_face_config(LLAMA_PRESETS[preset]) | {"num_hidden_layers": 2}
    assert not output_biases(fields)
    biased = fields | {"attention_bias": True}
    assert llama_config(biased) == replace(llama_config(fields), add_qkv_bias=True)
    assert output_biases(biased) == [f"model.layers.{n}.self_attn.o_proj.bias" for n in (0, 1)]
    assert llama_config(hugging_face_config(llama_config(biased))) == llama_config(biased)
    # transformers' classes of other families do not read the field
    for other in ("mistral", "qwen2"):
        assert not output_biases(biased | {"model_type": other})


LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 0.5, "high_freq_factor": 3.0}


@pytest.mark.slow("imports transformers")
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.5, "rope_theta": 5e5},
        {"type": "linear", "factor": 3.0},
        {"rope_type": "llama3", "type": "linear", **LLAMA3, "original_max_position_embeddings": 16},
        LLAMA3,
        *({"rope_type": kind, "factor": 1.0} for kind in ("linear", "dynamic", "yarn")),
        {"rope_type": "yarn", "factor": 1, "mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 9},
        {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16},
        {"type": "yarn", "factor": 8, "truncate": False, "beta_fast": 2.5, "beta_slow": 0.01},
        {"rope_type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 1.2},
        {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.8, "mscale": 0.7},
        {"rope_type": "longrope", "factor": 1.0, "long_factor": [1.0] * 4, "short_factor": [1] * 4},
        {"rope_type": "default", "factor": 5.0},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("form", "beside"),
    [
        ("rope_scaling", {"rope_theta": 7e3, "original_max_position_embeddings": 24}),
        ("rope_parameters", {}),
    ],
)
def test_scaled_positions_are_those_of_transformers(
    form: str, scaling: dict[str, Any], beside: dict[str, Any]
) -> None:
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    sizes = hugging_face_config(replace(LLAMA_PRESETS["7B"], kv_channels=8))
    del sizes["rope_theta"], sizes["rope_scaling"]
    fields = sizes | {"max_position_embeddings": 64, form: scaling} | beside
    theirs = LlamaRotaryEmbedding(AutoConfig.for_model(**copy.deepcopy(fields)))
    config = llama_config(fields)
    ours = inverse_frequencies(config)
    torch.testing.assert_close(ours, theirs.inv_freq, rtol=1e-6, atol=0.0)
    assert config.rotary_scale == pytest.approx(theirs.attention_scaling, rel=1e-12)
    again = llama_config(hugging_face_config(config))
    assert again.rotary_scale == pytest.approx(config.rotary_scale, rel=1e-12)
    torch.testing.assert_close(inverse_frequencies(again), ours, rtol=0.0, atol=0.0)
