"""Sizes, presets, and the numbers of parameters and FLOPs that follow."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from model.config import LLAMA_PRESETS, LlamaConfig, RecomputeConfig, preset_name
from model.flops import flops_per_token
from model.initialization import initialize_whole
from model.llama import Llama
from model.units import num_parameters, parameter_shapes
from tests.helpers.refusals import refused
from tests.model.values import SMALL


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


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        replace(SMALL, num_query_groups=2, ffn_hidden_size=37),
        replace(SMALL, num_query_groups=1, kv_channels=6),
        replace(SMALL, tie_embeddings_and_output_weights=True, num_layers=3),
        replace(SMALL, add_qkv_bias=True, qk_layernorm=True),
    ],
)
def test_flops_are_those_that_torch_counts(config: LlamaConfig) -> None:
    # The first block reads trained embeddings, so that every product has both gradients.
    wanted = flops_per_token(config, 24, causal=False) * 3 * 24
    assert counted_flops(config, set(parameter_shapes(config))) == wanted


def counted_flops(config: LlamaConfig, trained: set[str]) -> int:
    """Of a step over 3 samples of 24 tokens, by torch."""
    model = Llama(config)
    initialize_whole(model, config, seed=1)
    model.freeze(trained.__contains__)
    tokens_BS = torch.randint(config.vocab_size, (3, 24))
    # torch counts attention only if it is computed with matrix products.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens_BS, tokens_BS, torch.ones(3, 24)).backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize(
    "trained",
    [
        "blocks.1.*",
        "blocks.1.w_down,blocks.1.wo",
        "blocks.0.wk",
        "blocks.1.mlp_norm",
        "blocks.1.attention_norm",
        "blocks.0.w_gate,blocks.1.w_up",
        "head.norm",
        "head.weight",
        "embedding.weight",
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_flops_of_a_part_are_those_that_torch_counts(trained: str, *, tied: bool) -> None:
    config = replace(SMALL, qk_layernorm=True, tie_embeddings_and_output_weights=tied)
    names = {name for name in parameter_shapes(config) if is_one_of(name, trained)}
    if not names:
        assert tied
        return
    wanted = flops_per_token(config, 24, names, causal=False) * 3 * 24
    assert counted_flops(config, names) == wanted


def is_one_of(name: str, patterns: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns.split(","))


def test_recomputation_adds_no_flops_of_the_model() -> None:
    again = replace(SMALL, recompute=RecomputeConfig(granularity="full"))

    assert flops_per_token(again, 24, causal=False) == flops_per_token(SMALL, 24, causal=False)


def test_causal_attention_counts_half() -> None:
    config = LLAMA_PRESETS["7B"]
    full, causal = (flops_per_token(config, 2048, causal=causal) for causal in (False, True))

    # 12 * layers * hidden * sequence for all positions
    assert full - causal == 6 * 32 * 4096 * 2048
    assert causal == 6 * (6_738_415_616 - 65 * 4096 - 32000 * 4096) + 6 * 32 * 4096 * 2048


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 0) for name in ("num_layers", "ffn_hidden_size", "num_attention_heads")),
        *((name, 0) for name in ("num_query_groups", "kv_channels", "vocab_size")),
        ("max_position_embeddings", 0),
        ("hidden_size", -1),
        ("rope_scaling_factor", -8.0),
        ("rotary_seq_len_interpolation_factor", 0.0),
        ("rope_scaling_original_max_position_embeddings", 0),
        ("rope_scaling_low_freq_factor", 0.0),
        ("norm_epsilon", float("nan")),
        ("init_method_std", 0.0),
    ],
)
def test_a_mistake_names_its_flag(name: str, value: float) -> None:
    refused(lambda: replace(SMALL, **{name: value}), f"{flag_of(name)} {value}")


@pytest.mark.parametrize(
    ("name", "value", "others"),
    [
        ("num_query_groups", 3, ["num_attention_heads"]),
        ("kv_channels", 5, ["hidden_size", "num_attention_heads"]),
        ("rope_scaling_high_freq_factor", 1.0, ["rope_scaling_low_freq_factor"]),
    ],
)
def test_a_contradiction_names_all_flags(name: str, value: float, others: list[str]) -> None:
    refused(lambda: replace(SMALL, **{name: value}), *map(flag_of, [name, *others]))


@pytest.mark.parametrize(
    "wrong", [{"granularity": "some"}, {"method": "most"}, {"num_layers": 0}], ids=str
)
def test_recomputation_mistakes_name_their_flags(wrong: dict[str, object]) -> None:
    ((name, value),) = wrong.items()
    given = {"granularity": "full", **wrong}
    refused(lambda: RecomputeConfig(**given), f"{flag_of(f'recompute_{name}')} {value}")


def test_full_recomputation_alone_is_uniform_block_by_block() -> None:
    uniform = RecomputeConfig(granularity="full", method="uniform", num_layers=1)

    assert RecomputeConfig(granularity="full") == uniform


SELECTIVE = RecomputeConfig(granularity="selective")


@pytest.mark.parametrize(
    ("recompute", "first_layers", "group_size"),
    [
        (SELECTIVE, [None] * 5, 1),
        (replace(SELECTIVE, num_layers=2), [None] * 5, 1),
        (replace(SELECTIVE, method="block", num_layers=2), [None] * 5, 1),
        (RecomputeConfig(granularity="full"), [0, 1, 2, 3, 4], 1),
        (RecomputeConfig(granularity="full", num_layers=2), [0, 0, 2, 2, 4], 2),
        (RecomputeConfig(granularity="full", num_layers=5), [0, 0, 0, 0, 0], 5),
        (RecomputeConfig(granularity="full", num_layers=8), [0, 0, 0, 0, 0], 8),
        (RecomputeConfig(granularity="full", method="block"), [0, None, None, None, None], 1),
        (RecomputeConfig(granularity="full", method="block", num_layers=3),
         [0, 1, 2, None, None], 1),
        (RecomputeConfig(granularity="full", method="block", num_layers=8), [0, 1, 2, 3, 4], 1),
    ],
)  # fmt: skip
def test_which_layers_are_recomputed_and_from_where(
    recompute: RecomputeConfig, first_layers: list[int | None], group_size: int
) -> None:
    assert [recompute.first_layer(layer) for layer in range(5)] == first_layers
    assert recompute.group_size == group_size
    assert recompute.core_attention == (recompute.granularity == "selective")
