"""Sizes, presets, units, initial values, what trains, parameters, FLOPs, and muP's factors."""

from __future__ import annotations

import math
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch

from model.config import LLAMA_PRESETS, LlamaConfig, LoraConfig, RecomputeConfig, preset_name
from model.initialization import (
    BLOCK,
    ParameterInit,
    initial_values,
    initialize_whole,
    parameter_initializers,
)
from model.llama import Llama
from model.mup import embedding_scale, logit_scale, width_of
from model.trainable import Trainable
from model.units import (
    flops_per_token,
    num_parameters,
    parameter_shapes,
    recomputed_groups,
    unit_specs,
)
from paro.training.step import train_step
from tests.helpers.refusals import refused
from tests.helpers.training import begun, built, whole_parameters
from tests.model.test_llama import BOTH, MHA, batch, build
from tests.model.values import SMALL, assert_near, flops_of

PUBLISHED = (
    "7B 6738415616, 13B 13015864320, 30B 32528943616, 65B 65285660672, llama2-70B 68976648192, "
    "llama3-8B 8030261248, llama3.1-70B 70553706496, llama3.1-405B 405853388800, "
    "llama3.2-1B 1235814400, llama3.2-3B 3212749824, qwen3-0.6B 596049920, qwen3-1.7B 1720574976, "
    "qwen3-4B 4022468096, qwen3-8B 8190735360, qwen3-14B 14768307200, qwen3-32B 32762123264, "
    "mistral-7B 7248023552, mistral-nemo-12B 12247782400, mistral-small-24B 23572403200, "
    "mistral-large-123B 122610069504"
)


def test_presets_have_the_published_number_of_parameters() -> None:
    for preset, published in map(str.split, PUBLISHED.split(", ")):
        assert num_parameters(LLAMA_PRESETS[preset]) == int(published), preset


def test_case_and_dashes_of_a_preset_do_not_matter() -> None:
    spelled = {"llama3-8b": "llama3-8B", "Llama-3.1-405B": "llama3.1-405B", "8B": "8B"}
    spelled |= {"llama3.18B": "llama3.1-8B", **dict(zip(LLAMA_PRESETS, LLAMA_PRESETS, strict=True))}
    assert {text: preset_name(text) for text in spelled} == spelled


# Norms of heads and biases have no products; the others change the sizes of products.
OF_ALL_SIZES = [
    replace(SMALL, num_query_groups=2, ffn_hidden_size=37),
    replace(SMALL, num_query_groups=1, kv_channels=6),
    replace(SMALL, add_qkv_bias=True, qk_layernorm=True),
    replace(SMALL, tie_embeddings_and_output_weights=True, num_layers=3),
]


TRAINED = (
    *("*", "blocks.1.*", "blocks.1.w[_o]*", "blocks.0.wk", "blocks.1.mlp_norm"),
    *("blocks.1.attention_norm", "blocks.[01].w_[gu]*"),
    *("head.norm", "head.weight", "embedding.weight"),
)


@pytest.mark.slow("counts operations of models")
@pytest.mark.parametrize("trained", TRAINED)
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


def test_causal_attention_counts_half() -> None:
    config = LLAMA_PRESETS["7B"]
    full, causal = (flops_per_token(config, 2048, causal=causal) for causal in (False, True))

    # 12 * layers * hidden * sequence for all positions
    assert full - causal == 6 * 32 * 4096 * 2048
    assert causal == 6 * (6_738_415_616 - 65 * 4096 - 32000 * 4096) + 6 * 32 * 4096 * 2048


def test_a_mistake_names_its_flag_and_what_it_contradicts() -> None:
    for name, value, others in (
        *((name, 0, "") for name in ("num_layers", "ffn_hidden_size", "num_attention_heads")),
        *((name, 0, "") for name in ("num_query_groups", "kv_channels", "vocab_size")),
        ("max_position_embeddings", 0, ""),
        ("hidden_size", -1, ""),
        ("rope_scaling_factor", -8.0, ""),
        ("rotary_seq_len_interpolation_factor", 0.0, ""),
        ("rope_scaling_original_max_position_embeddings", 0, ""),
        ("rope_scaling_low_freq_factor", 0.0, ""),
        ("yarn_rotary_scaling_factor", 0.5, ""),
        ("yarn_beta_fast", 1e308, ""),
        ("yarn_beta_slow", 1e-320, ""),
        ("yarn_mscale", -10.0, ""),
        ("yarn_mscale_all_dim", -1e3, ""),
        ("use_rope_scaling", True, "--position-embedding-type"),
        ("rotary_seq_len_interpolation_factor", 2.0, "--position-embedding-type"),
        ("rotary_base", 1.0, ""),
        ("yarn_beta_slow", 32.0, "--yarn-beta-fast"),
        ("norm_epsilon", float("nan"), ""),
        ("z_loss_weight", -1.0, ""),
        ("z_loss_weight", float("inf"), ""),
        ("init_method_std", 0.0, ""),
        ("mup_base_hidden_size", 0, ""),
        *((f"mup_{name}", -1.0, "") for name in ("embedding_mult", "output_mult", "base_head_dim")),
        ("mup_attn_scale_power", 9.0, ""),
        ("num_query_groups", 3, "--num-attention-heads"),
        ("kv_channels", 5, "--hidden-size --num-attention-heads"),
        ("rope_scaling_high_freq_factor", 1.0, "--rope-scaling-low-freq-factor"),
    ):
        flag = f"--{name.replace('_', '-')}"
        message = others.split() or [f"{flag} {value}"]
        stretched = {"position_embedding_type": "yarn", "yarn_rotary_scaling_factor": 4.0}
        changed: dict[str, Any] = stretched | {name: value}
        refused(partial(replace, SMALL, **changed), flag, *message)


PAIRS = RecomputeConfig(granularity="full", num_layers=2)
FIRST_TWO = RecomputeConfig(granularity="full", method="block", num_layers=2)
ALL_PAIRS = [[1, 2], [3, 4], [5]]
OF_PAIRS = (ALL_PAIRS, ALL_PAIRS, [[2], [3, 4], [5]], [[3, 4], [5]], [[4], [5]], [[5]], [])


def test_groups_begin_at_the_first_unit_that_trains() -> None:
    refused(lambda: replace(PAIRS, num_layers=0), "--recompute-num-layers 0")
    selective = RecomputeConfig(granularity="selective")
    for recompute, first, groups in (
        (None, 0, []),
        (selective, 0, []),
        (replace(selective, method="block", num_layers=2), 0, []),
        (replace(PAIRS, num_layers=8), 0, [[1, 2, 3, 4, 5]]),
        (replace(FIRST_TWO, num_layers=8), 4, [[4], [5]]),
        (RecomputeConfig(granularity="full"), 2, [[2], [3], [4], [5]]),
        *((PAIRS, first, groups) for first, groups in enumerate(OF_PAIRS)),
        *((FIRST_TWO, first, groups) for first, groups in ((1, [[1], [2]]), (2, [[2]]))),
    ):
        units = unit_specs(replace(MHA, num_layers=5, recompute=recompute))
        found = [[*group] for group in recomputed_groups(units, first)]
        assert found == groups, (recompute, first)


CONFIG = replace(SMALL, num_layers=5)
NAMES = frozenset(parameter_shapes(CONFIG))


def names(text: str, config: LlamaConfig = CONFIG) -> frozenset[str]:
    return Trainable.of_flag(text).names(config)


def test_the_last_blocks_train_and_the_head_does_not_and_patterns_match_whole_names() -> None:
    for share, first in (("0.0625", 4), ("0.2", 4), ("0.5", 3), ("0.6", 2), ("1", 0)):
        wanted = {n for n in NAMES for layer in range(first, 5) if n.startswith(f"blocks.{layer}.")}
        assert names(f"last-blocks:{share}") == wanted
    assert names("all") == names("names:*") == NAMES
    assert names("names:head.*") == {"head.norm", "head.weight"}
    assert names("names:blocks.[13].wq,head.norm") == {"blocks.1.wq", "blocks.3.wq", "head.norm"}
    for text in ("all", "last-blocks:0.0625", "names:*.wq,head.norm"):
        assert str(Trainable.of_flag(text)) == text


def test_other_words_are_refused() -> None:
    for text in ("full", "last-blocks", "last-blocks:x", "names", "names:", "names:a,,b", "all:1"):
        message = f"'{text}' is none of all, last-blocks:SHARE, names:PATTERN"
        refused(partial(names, text), message)
    for share in ("0", "-1", "1.01", "nan", "inf"):
        refused(partial(names, f"last-blocks:{share}"), "above 0 and at most 1")
    refused(lambda: names("names:head.norm,wq"), "matches 'wq'; ... blocks.*.wq,")
    tied = replace(CONFIG, tie_embeddings_and_output_weights=True)
    refused(lambda: names("names:head.weight", tied), "no parameter matches 'head.weight'")


def test_a_models_adapters_train() -> None:
    adapted = replace(CONFIG, lora=LoraConfig(rank=2, targets=("wo",)))
    wanted = {f"blocks.{layer}.wo_lora_{part}" for layer in range(5) for part in "ab"}
    assert Trainable().names(adapted) == wanted
    assert Trainable().is_part(adapted)
    assert not Trainable().is_part(CONFIG)


SEVERAL_BLOCKS = ParameterInit(name="blocks.0.wq", numel=2 * BLOCK + 1001, std=0.02)


def test_pieces_by_any_number_of_threads_are_those_of_the_whole() -> None:
    numel = SEVERAL_BLOCKS.numel
    whole = initial_values(SEVERAL_BLOCKS, 1, 0, numel)
    several = [7, 8, BLOCK // 2, 2 * BLOCK, 2 * BLOCK + 1000]
    every = ([1], [BLOCK], [BLOCK - 1, BLOCK + 1], several, [0, 5, 5])  # empty pieces too
    for num_threads, cuts in product((1, 4), every):
        pieces = [
            initial_values(SEVERAL_BLOCKS, 1, low, high, num_threads=num_threads)
            for low, high in pairwise([0, *cuts, numel])
        ]
        assert torch.equal(torch.cat(pieces), whole), cuts


def test_the_rule_of_seeds_stays_and_every_parameter_seed_and_place_has_its_own_values() -> None:
    """A change of the rule changes the loss curve of every --seed."""
    spec = ParameterInit(name="blocks.3.w_up", numel=BLOCK + 20, std=1.0)
    first, last = initial_values(spec, 1234, 0, 3), initial_values(spec, 1234, BLOCK, BLOCK + 3)
    wanted_first = torch.tensor([1.0209452, -0.7691444, 0.0403610])
    wanted_last = torch.tensor([0.5105639, -0.9103844, -0.3114735])
    torch.testing.assert_close(first, wanted_first, rtol=0, atol=1e-6)
    torch.testing.assert_close(last, wanted_last, rtol=0, atol=1e-6)
    ours = initial_values(SEVERAL_BLOCKS, 1, 0, 100)
    other = replace(SEVERAL_BLOCKS, name="blocks.0.wk")
    for spec, seed, at in ((other, 1, 0), (SEVERAL_BLOCKS, 2, 0), (SEVERAL_BLOCKS, 1, BLOCK)):
        assert not torch.isclose(initial_values(spec, seed, at, at + 100), ours).any()


def test_what_adds_to_the_residual_stream_starts_narrow() -> None:
    config = replace(SMALL, num_layers=8, init_method_std=0.04)
    specs = parameter_initializers(config)
    narrow = {name for name, spec in specs.items() if spec.std == 0.04 / math.sqrt(2 * 8)}
    ones = {name for name, spec in specs.items() if spec.std is None}
    assert narrow == {f"blocks.{i}.{part}" for i in range(8) for part in ("wo", "w_down")}
    norms = {f"blocks.{i}.{part}" for i in range(8) for part in ("attention_norm", "mlp_norm")}
    assert ones == {"head.norm", *norms}
    assert torch.equal(initial_values(specs["head.norm"], 1, 2, 6), torch.ones(4))
    assert {specs[name].std for name in specs.keys() - narrow - ones} == {0.04}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_whole_model_gets_the_values_of_its_pieces(dtype: torch.dtype) -> None:
    config = replace(SMALL, tie_embeddings_and_output_weights=True)
    model = Llama(config).to(dtype)
    initialize_whole(model, config, seed=5)
    specs = parameter_initializers(config)
    assert specs.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        expected = initial_values(specs[name], 5, 0, specs[name].numel)
        assert torch.equal(parameter, expected.view(parameter.shape).to(dtype)), name
        assert parameter.requires_grad


FACTORS = {"mup_embedding_mult": 3.0, "mup_output_mult": 0.3, "mup_base_head_dim": 5.0}


@pytest.mark.parametrize("plain", [MHA, BOTH])
def test_factors_are_those_of_weights(plain: LlamaConfig) -> None:
    config = replace(plain, use_mup=True, mup_attn_scale_power=0.9, **FACTORS)
    model, wanted = build(config), build(plain)
    of_scores = math.sqrt(5.0) / config.kv_channels**0.9 * math.sqrt(config.kv_channels)
    with torch.no_grad():
        wanted.embedding.weight *= 3.0
        assert wanted.head.weight is not None
        wanted.head.weight *= 0.3
        for block in wanted.blocks:
            weight = block.q_norm if config.qk_layernorm else block.wq
            weight *= of_scores
        tokens_BS, _, _ = batch()
        assert_near(model(tokens_BS), wanted(tokens_BS), 1e-5)


def test_matrices_of_blocks_begin_smaller_unless_at_the_base() -> None:
    config = replace(MHA, use_mup=True, mup_base_head_dim=MHA.kv_channels)
    assert (width_of(config), embedding_scale(config), logit_scale(config)) == (1.0, 1.0, 1.0)
    assert config.rotary_scale == 1.0
    assert parameter_initializers(config) == parameter_initializers(MHA)
    config = replace(MHA, use_mup=True, mup_base_hidden_size=16)  # of 64, with 3 blocks
    std, found = config.init_method_std, parameter_initializers(config)
    assert logit_scale(config) == 0.25
    assert found["blocks.1.wq"].std == found["blocks.1.w_up"].std == std / 2
    assert found["blocks.1.wo"].std == found["blocks.1.w_down"].std == std / 2 / math.sqrt(6.0)
    assert found["embedding.weight"].std == found["head.weight"].std == std


MUP = "--use-mup --mup-base-hidden-size 64 --mup-base-head-dim 16"
STEPS = 10


def sizes_after_training(width: int, more: str) -> list[float]:
    """The root mean square of the outputs of both blocks and of the logits after 10 steps."""
    config, training = built(
        "--distributed-backend gloo --mock-data --tokenizer-type NullTokenizer --vocab-size 60 "
        f"--num-layers 2 --hidden-size {width} --num-attention-heads 4 --seq-length 16 "
        f"--ffn-hidden-size {2 * width} --micro-batch-size 4 --num-workers 0 --lr 0.01 "
        f"--lr-decay-style constant --init-method-std 0.05 --train-iters {STEPS + 1} {more}"
    )
    state, source = begun(config, training)
    tokens_BS = next(source).tokens_BS
    for _ in range(STEPS):
        train_step(training, state, source)
    model, sizes = Llama(config.model), []
    model.load_state_dict(whole_parameters(training))
    for module in (*model.blocks, model.head):
        module.register_forward_hook(
            lambda _module, _args, out: sizes.append(float(out.square().mean().sqrt()))
        )
    with torch.no_grad():
        model(tokens_BS)
    return sizes


@pytest.mark.verify
@pytest.mark.slow("trains models of widths up to 512")
def test_activations_after_training_are_those_of_the_base_with_mup_alone() -> None:
    base = sizes_after_training(64, MUP)
    for more, least, most in ((MUP, 0.6, 1.5), ("", 2.0, math.inf)):
        sizes = sizes_after_training(512, more)
        ratios = [size / wanted for size, wanted in zip(sizes, base, strict=True)]
        assert all(least < ratio < most for ratio in ratios), ratios
