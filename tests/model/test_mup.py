"""muP: a model has the weights of a plain one times its factors, and activations of any width."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from model.config import LlamaConfig
from model.initialization import parameter_initializers
from model.llama import Llama
from model.mup import embedding_scale, logit_scale, width_of
from paro.training.step import train_step
from tests.helpers.training import begun, built, whole_parameters
from tests.model.test_llama import BOTH, MHA, batch, build
from tests.model.values import assert_near

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


def test_at_the_base_it_is_no_other_model() -> None:
    config = replace(MHA, use_mup=True, mup_base_head_dim=MHA.kv_channels)
    assert (width_of(config), embedding_scale(config), logit_scale(config)) == (1.0, 1.0, 1.0)
    assert config.rotary_scale == 1.0
    assert parameter_initializers(config) == parameter_initializers(MHA)


def test_matrices_of_blocks_begin_smaller() -> None:
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


@pytest.mark.slow("trains models of widths up to 512")
@pytest.mark.parametrize(
    ("width", "more", "least", "most"), [(512, MUP, 0.6, 1.5), (512, "", 2.0, math.inf)]
)
def test_activations_after_training_are_those_of_the_base_with_mup_alone(
    width: int, more: str, least: float, most: float
) -> None:
    base, found = sizes_after_training(64, MUP), sizes_after_training(width, more)
    ratios = [size / wanted for size, wanted in zip(found, base, strict=True)]
    assert all(least < ratio < most for ratio in ratios), ratios
