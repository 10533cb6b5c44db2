"""Sizes, presets, units, what trains, and the numbers of parameters and FLOPs that follow."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial

import pytest
import torch

from model.config import LLAMA_PRESETS, LlamaConfig, LoraConfig, RecomputeConfig, preset_name
from model.initialization import initialize_whole
from model.llama import Llama
from model.trainable import Trainable
from model.units import (
    first_trained_unit,
    flops_per_token,
    num_parameters,
    parameter_shapes,
    recomputed_groups,
    unit_specs,
)
from tests.helpers.refusals import refused
from tests.model.test_llama import CONFIGS, MHA
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
        ("yarn_rotary_scaling_factor", 0.5, ""),
        ("yarn_beta_slow", 32.0, "--yarn-beta-fast"),
        ("norm_epsilon", float("nan"), ""),
        ("z_loss_weight", -1.0, ""),
        ("z_loss_weight", float("inf"), ""),
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


def test_who_borrows_and_whose_backward_reads_weights() -> None:
    untied, tied = (unit_specs(CONFIGS[name]) for name in ("mha", "tied"))

    assert [unit.borrows for unit in untied] == [()] * 5
    assert [unit.borrows for unit in tied] == [(), (), (), (), ("embedding",)]
    assert [unit.backward_needs_weight for unit in untied] == [False, True, True, True, True]


def test_parts_are_called_by_who_holds_their_matrices() -> None:
    for name, head in (("mha", "head"), ("tied", "embedding")):
        units = unit_specs(replace(CONFIGS[name], num_layers=1))
        labels = [unit.label_of(part) for unit in units for part in unit.parts]
        assert labels == ["embedding", "blocks.0.attention", "blocks.0.mlp", head]


@pytest.mark.parametrize(
    ("trained", "first"),
    [("embedding.weight", 0), ("blocks.1.wo", 2), ("head.norm", 4), ("another", 5)],
)
def test_the_first_unit_that_trains(trained: str, first: int) -> None:
    assert first_trained_unit(unit_specs(MHA), trained.__eq__) == first


PAIRS = RecomputeConfig(granularity="full", num_layers=2)
FIRST_TWO = RecomputeConfig(granularity="full", method="block", num_layers=2)


@pytest.mark.parametrize(
    ("recompute", "first", "groups"),
    [
        (None, 0, []),
        (RecomputeConfig(granularity="selective"), 0, []),
        (RecomputeConfig(granularity="selective", method="block", num_layers=2), 0, []),
        (replace(PAIRS, num_layers=8), 0, [[1, 2, 3, 4, 5]]),
        (replace(FIRST_TWO, num_layers=8), 4, [[4], [5]]),
        (RecomputeConfig(granularity="full"), 2, [[2], [3], [4], [5]]),
        (PAIRS, 0, [[1, 2], [3, 4], [5]]),
        (PAIRS, 2, [[2], [3, 4], [5]]),
        (PAIRS, 3, [[3, 4], [5]]),
        (PAIRS, 6, []),
        (FIRST_TWO, 1, [[1], [2]]),
        (FIRST_TWO, 2, [[2]]),
    ],
)
def test_groups_begin_at_the_first_unit_that_trains(
    recompute: RecomputeConfig | None, first: int, groups: list[list[int]]
) -> None:
    units = unit_specs(replace(MHA, num_layers=5, recompute=recompute))
    assert [[*group] for group in recomputed_groups(units, first)] == groups


CONFIG = replace(SMALL, num_layers=5)
NAMES = frozenset(parameter_shapes(CONFIG))


def names(text: str) -> frozenset[str]:
    return Trainable.of_flag(text).names(CONFIG)


def test_all_trains_every_parameter() -> None:
    assert names("all") == NAMES


@pytest.mark.parametrize(
    ("share", "layers"),
    [("0.0625", [4]), ("0.2", [4]), ("0.5", [3, 4]), ("0.6", [2, 3, 4]), ("1", [0, 1, 2, 3, 4])],
)
def test_the_last_blocks_train_and_the_head_does_not(share: str, layers: list[int]) -> None:
    wanted = {n for n in NAMES if any(n.startswith(f"blocks.{layer}.") for layer in layers)}
    assert names(f"last-blocks:{share}") == wanted


def test_patterns_match_whole_names() -> None:
    assert names("names:head.*") == {"head.norm", "head.weight"}
    assert names("names:blocks.[13].wq,head.norm") == {"blocks.1.wq", "blocks.3.wq", "head.norm"}
    assert names("names:*") == NAMES


@pytest.mark.parametrize(
    "text", ["full", "last-blocks", "last-blocks:x", "names", "names:", "names:a,,b", "all:1", ""]
)
def test_other_words_are_refused(text: str) -> None:
    refused(lambda: Trainable.of_flag(text), "is none of all, last-blocks:SHARE, names:PATTERN")


@pytest.mark.parametrize("share", ["0", "-1", "1.01", "nan", "inf"])
def test_a_share_is_above_0_and_at_most_1(share: str) -> None:
    refused(lambda: Trainable.of_flag(f"last-blocks:{share}"), "above 0 and at most 1")


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    refused(lambda: names("names:head.norm,wq"), "matches 'wq'; ... blocks.*.wq,")
    tied = replace(CONFIG, tie_embeddings_and_output_weights=True)
    tied_head = Trainable.of_flag("names:head.weight")
    refused(lambda: tied_head.names(tied), "no parameter matches 'head.weight'")


def test_a_models_adapters_train() -> None:
    adapted = replace(CONFIG, lora=LoraConfig(rank=2, targets=("wo",)))
    wanted = {f"blocks.{layer}.wo_lora_{part}" for layer in range(5) for part in "ab"}
    assert Trainable().names(adapted) == wanted
    assert Trainable().is_part(adapted)
    assert not Trainable().is_part(CONFIG)
    refused(lambda: Trainable.of_flag("adapters:0.1"), "'adapters:0.1' is none of")


@pytest.mark.parametrize("text", ["all", "last-blocks:0.0625", "names:*.wq,head.norm"])
def test_it_prints_as_it_is_given(text: str) -> None:
    assert str(Trainable.of_flag(text)) == text
