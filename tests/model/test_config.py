"""Sizes, presets, and the numbers of parameters and FLOPs that follow."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial

import pytest
import torch

from model.config import LLAMA_PRESETS, LlamaConfig, RecomputeConfig, preset_name
from model.initialization import initialize_whole
from model.llama import Llama
from model.units import flops_per_token, num_parameters, parameter_shapes
from tests.helpers.refusals import refused
from tests.model.values import SMALL, flops_of


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        ("7B", 6_738_415_616),
        ("13B", 13_015_864_320),
        ("30B", 32_528_943_616),
        ("65B", 65_285_660_672),
        ("llama2-70B", 68_976_648_192),
        ("llama3-8B", 8_030_261_248),
        ("llama3.1-70B", 70_553_706_496),
        ("llama3.2-1B", 1_235_814_400),
        ("llama3.2-3B", 3_212_749_824),
        ("llama3.1-405B", 405_853_388_800),
        ("qwen3-0.6B", 596_049_920),
        ("qwen3-1.7B", 1_720_574_976),
        ("qwen3-4B", 4_022_468_096),
        ("qwen3-8B", 8_190_735_360),
        ("qwen3-14B", 14_768_307_200),
        ("qwen3-32B", 32_762_123_264),
        ("mistral-7B", 7_248_023_552),
        ("mistral-nemo-12B", 12_247_782_400),
        ("mistral-small-24B", 23_572_403_200),
        ("mistral-large-123B", 122_610_069_504),
    ],
)
def test_presets_have_the_published_number_of_parameters(preset: str, published: int) -> None:
    assert num_parameters(LLAMA_PRESETS[preset]) == published


def test_presets_are_listed_by_size() -> None:
    sizes = [num_parameters(preset) for preset in LLAMA_PRESETS.values()]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("llama3-8b", "llama3-8B"),
        ("LLAMA3_8B", "llama3-8B"),
        ("Llama-3.1-405B", "llama3.1-405B"),
        ("Qwen3-0.6B", "qwen3-0.6B"),
        ("7b", "7B"),
        ("llama3.18B", "llama3.1-8B"),
        ("8B", "8B"),
    ],
)
def test_case_and_dashes_of_a_preset_do_not_matter(text: str, name: str) -> None:
    assert preset_name(text) == name
    assert all(preset_name(own) == own for own in LLAMA_PRESETS), "two have the same fields"


# Norms of heads and biases have no products; the others change the sizes of products.
OF_ALL_SIZES = [
    replace(SMALL, num_query_groups=2, ffn_hidden_size=37),
    replace(SMALL, num_query_groups=1, kv_channels=6),
    replace(SMALL, add_qkv_bias=True, qk_layernorm=True),
    replace(SMALL, tie_embeddings_and_output_weights=True, num_layers=3),
]


@pytest.mark.parametrize(
    "trained",
    [
        "*",
        "blocks.1.*",
        "blocks.1.w[_o]*",
        "blocks.0.wk",
        "blocks.1.mlp_norm",
        "blocks.1.attention_norm",
        "blocks.[01].w_[gu]*",
        "head.norm",
        "head.weight",
        "embedding.weight",
    ],
)
@pytest.mark.parametrize("config", OF_ALL_SIZES)
def test_flops_are_those_that_torch_counts(config: LlamaConfig, trained: str) -> None:
    names = {name for name in parameter_shapes(config) if fnmatchcase(name, trained)}
    if not names:
        assert config.tie_embeddings_and_output_weights
        return
    model = Llama(config)
    initialize_whole(model, config, seed=1)
    model.freeze(names.__contains__)
    tokens_BS = torch.randint(config.vocab_size, (3, 24))
    counted = flops_of(lambda: model(tokens_BS, tokens_BS, torch.ones(3, 24)).backward())
    assert counted == flops_per_token(config, 24, names, causal=False) * 3 * 24
    if trained == "*":
        assert counted == flops_per_token(config, 24, causal=False) * 3 * 24


def test_recomputation_adds_no_flops_of_the_model() -> None:
    again = replace(SMALL, recompute=RecomputeConfig(granularity="full"))

    assert flops_per_token(again, 24, causal=False) == flops_per_token(SMALL, 24, causal=False)


def test_causal_attention_counts_half() -> None:
    config = LLAMA_PRESETS["7B"]
    full, causal = (flops_per_token(config, 2048, causal=causal) for causal in (False, True))

    # 12 * layers * hidden * sequence for all positions
    assert full - causal == 6 * 32 * 4096 * 2048
    assert causal == 6 * (6_738_415_616 - 65 * 4096 - 32000 * 4096) + 6 * 32 * 4096 * 2048


@pytest.mark.parametrize(
    ("name", "value", "others"),
    [
        *((name, 0, "") for name in ("num_layers", "ffn_hidden_size", "num_attention_heads")),
        *((name, 0, "") for name in ("num_query_groups", "kv_channels", "vocab_size")),
        ("max_position_embeddings", 0, ""),
        ("hidden_size", -1, ""),
        ("rope_scaling_factor", -8.0, ""),
        ("rotary_seq_len_interpolation_factor", 0.0, ""),
        ("rope_scaling_original_max_position_embeddings", 0, ""),
        ("rope_scaling_low_freq_factor", 0.0, ""),
        ("norm_epsilon", float("nan"), ""),
        ("init_method_std", 0.0, ""),
        ("num_query_groups", 3, "--num-attention-heads"),
        ("kv_channels", 5, "--hidden-size --num-attention-heads"),
        ("rope_scaling_high_freq_factor", 1.0, "--rope-scaling-low-freq-factor"),
    ],
)
def test_a_mistake_names_its_flag_and_what_it_contradicts(
    name: str, value: float, others: str
) -> None:
    flag = f"--{name.replace('_', '-')}"
    told = others.split() or [f"{flag} {value}"]
    refused(lambda: replace(SMALL, **{name: value}), flag, *told)


def test_a_number_of_blocks_to_recompute_is_positive() -> None:
    wrong = partial(RecomputeConfig, granularity="full", num_layers=0)
    refused(wrong, "--recompute-num-layers 0")
