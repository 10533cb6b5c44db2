"""The model equals transformers', is divided into units, and recomputes without a change."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from model import block_attention
from model.config import LlamaConfig, RecomputeConfig
from model.hugging_face import hugging_face_config, hugging_face_name
from model.initialization import initialize_whole
from model.llama import Llama
from model.units import flops_per_token, unit_specs
from tests.helpers.triton_kernels import hopper
from tests.model.values import SMALL, assert_near, attention_by_definition, flops_of

B, S = 2, 64
SIZES = {"hidden_size": 64, "ffn_hidden_size": 96, "kv_channels": 16, "vocab_size": 101}
MHA = replace(SMALL, num_layers=3, max_position_embeddings=S, init_method_std=0.15, **SIZES)
LLAMA3 = replace(MHA, num_query_groups=2, rotary_base=5e5, use_rope_scaling=True)
CONFIGS = {
    "mha": MHA,
    "gqa of 2": replace(MHA, num_query_groups=2),
    "mqa, epsilon": replace(MHA, num_query_groups=1, norm_epsilon=1e-2),
    "tied": replace(MHA, tie_embeddings_and_output_weights=True),
    "odd ffn, wide heads": replace(MHA, ffn_hidden_size=77, kv_channels=24, num_query_groups=2),
    "linear by 4": replace(MHA, rotary_seq_len_interpolation_factor=4.0),
    "llama3 by 8": LLAMA3,
    "yarn by 4": replace(
        MHA,
        position_embedding_type="yarn",
        yarn_rotary_scaling_factor=4.0,
        yarn_original_max_position_embeddings=16,
    ),
    "qkv bias": replace(MHA, num_query_groups=2, add_qkv_bias=True),
    "qk norm": replace(MHA, num_query_groups=2, kv_channels=24, qk_layernorm=True),
}
BOTH = replace(MHA, num_query_groups=2, add_qkv_bias=True, qk_layernorm=True)


def build(config: LlamaConfig) -> Llama:
    """A model with norms other than one and biases other than zero, so that both have an effect."""
    model = Llama(config)
    initialize_whole(model, config, seed=7)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels, and weights of which some are zero."""
    generator = torch.Generator().manual_seed(9)
    tokens, labels = torch.randint(101, (2, B, S), generator=generator)
    weights = torch.rand(B, S, generator=generator) / (B * S)
    return tokens, labels, weights * (torch.rand(B, S, generator=generator) > 0.2)


def taken_gradients(model: Llama) -> dict[str, Tensor]:
    """All gradients, which the model no longer has."""
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name], parameter.grad = parameter.grad, None
    return found


def train_once(model: Llama) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model(*batch())
    loss.backward()
    return loss.detach(), taken_gradients(model)


def transformers_model(model: Llama) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = AutoConfig.for_model(**hugging_face_config(model.config))
    reference = AutoModelForCausalLM.from_config(fields)
    theirs = dict(reference.named_parameters())
    ours = {hugging_face_name(name): p for name, p in model.named_parameters()}
    assert theirs.keys() == ours.keys()
    with torch.no_grad():
        for name, parameter in theirs.items():
            parameter.copy_(ours[name])
    return reference


def assert_trains_alike(model: Llama, reference: Llama) -> None:
    wanted_loss, wanted = train_once(reference)
    loss, gradients = train_once(model)
    assert_near(loss, wanted_loss, "loss")
    for name, gradient in gradients.items():
        assert_near(gradient, wanted[name], name)


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_transformers(name: str) -> None:
    model = build(CONFIGS[name])
    reference = transformers_model(model)
    tokens, labels, weights = batch()
    their_logits = reference(input_ids=tokens).logits
    with torch.no_grad():
        assert_near(model(tokens), their_logits, "logits")
    losses = F.cross_entropy(their_logits.flatten(0, 1), labels.flatten(), reduction="none")
    their_loss = (losses * weights.flatten()).sum()
    their_loss.backward()
    loss, gradients = train_once(model)
    assert_near(loss, their_loss.detach(), "loss")
    theirs = dict(reference.named_parameters())
    for own_name, gradient in gradients.items():
        assert_near(gradient, theirs[hugging_face_name(own_name)].grad, own_name)


FULL = RecomputeConfig(granularity="full")
# With the number of times that three blocks then compute their attention's core.
VARIANTS: dict[str, tuple[RecomputeConfig | None, int]] = {
    "none": (None, 3),
    "selective": (RecomputeConfig(granularity="selective"), 6),
    "uniform, 1": (FULL, 6),
    "uniform, 2 and what is left": (replace(FULL, num_layers=2), 6),
    "uniform, more than there are": (replace(FULL, num_layers=5), 6),
    "block, 1": (replace(FULL, method="block"), 4),
    "block, 2": (replace(FULL, method="block", num_layers=2), 5),
    "block, more than there are": (replace(FULL, method="block", num_layers=5), 6),
    "uniform, attention kept": (replace(FULL, keeps_core=True), 3),
    "uniform, 2, attention kept": (replace(FULL, num_layers=2, keeps_core=True), 3),
    "block, 2, attention kept": (replace(FULL, method="block", num_layers=2, keeps_core=True), 3),
}


def recomputing(variant: str, config: LlamaConfig = MHA) -> Llama:
    return build(replace(config, recompute=VARIANTS[variant][0]))


@pytest.mark.slow("trains a step")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("config", [BOTH, CONFIGS["tied"]])
def test_recomputation_changes_no_bit_and_computes_again_what_it_says(
    config: LlamaConfig, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, gradients = train_once(build(config))
    core = Mock(side_effect=F.scaled_dot_product_attention)
    monkeypatch.setattr(F, "scaled_dot_product_attention", core)
    block = Mock(side_effect=block_attention.attend_block)
    monkeypatch.setattr(block_attention, "attend_block", block)
    loss_again, gradients_again = train_once(recomputing(variant, config))
    assert core.call_count + block.call_count == VARIANTS[variant][1]
    assert torch.equal(loss, loss_again)
    for own_name, gradient in gradients.items():
        assert torch.equal(gradient, gradients_again[own_name]), own_name


@pytest.mark.parametrize("variant", [name for name in VARIANTS if "attention kept" in name])
def test_a_hopper_keeps_attention_by_cudnn(variant: str) -> None:
    config = CONFIGS["gqa of 2"]
    loss, gradients = train_once(build(config))
    with hopper() as used:
        found, gradients_found = train_once(recomputing(variant, config))
    assert {kernel.name for kernel in used} == {"CUDNN_ATTENTION"}
    assert_near(found, loss, "loss")
    for own_name, gradient in gradients.items():
        assert_near(gradients_found[own_name], gradient, own_name)


@pytest.mark.parametrize("variant", ["none", "selective", "uniform, 1", "block, 1"])
def test_units_hold_everything_once_and_run_once(variant: str) -> None:
    """Hooks on units gather and release: recomputation must not run them again."""
    model = recomputing(variant)
    units = unit_specs(model.config)
    blocks = ("blocks.0", "blocks.1", "blocks.2")
    assert [unit.name for unit in units] == ["embedding", *blocks, "head"]
    modules = {unit.name: model.get_submodule(unit.name) for unit in units}
    held = Counter(id(p) for module in modules.values() for p in module.parameters())
    assert held == Counter(id(p) for p in model.parameters())
    order: list[str] = []
    for name, module in modules.items():
        module.register_forward_hook(lambda *_, name=name: order.append(name))
    train_once(model)
    assert order == [unit.name for unit in units]


@pytest.mark.parametrize(
    ("frozen", "again"),
    [
        ((), ["blocks.2", "blocks.0", "blocks.1"]),
        (("embedding", "blocks.0"), ["blocks.2", "blocks.1"]),
        (("embedding", "blocks.0", "blocks.1"), ["blocks.2"]),
        (("embedding", "blocks"), []),
    ],
)
def test_units_of_one_recomputed_run_run_again_together(
    frozen: tuple[str, ...], again: list[str]
) -> None:
    model = recomputing("uniform, 2 and what is left")
    model.freeze(lambda name: not name.startswith(frozen))
    order: list[str] = []
    for unit in unit_specs(model.config):
        module = model.get_submodule(unit.name)
        module.register_forward_pre_hook(lambda *_, name=unit.name: order.append(name))
    model(*batch()).backward()
    assert order[:5] == ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert order[5:] == again


@pytest.mark.parametrize(
    "variant", ["none", "uniform, 2 and what is left", "uniform, 2, attention kept"]
)
@pytest.mark.parametrize(
    "trained", [["blocks.1.wq"], ["head.norm"], ["blocks.0.w_up", "head.weight"]]
)
def test_frozen_parameters_change_no_gradient_of_others(trained: list[str], variant: str) -> None:
    _, wanted = train_once(build(MHA))
    model = recomputing(variant)
    model.freeze(trained.__contains__)
    model(*batch()).backward()
    got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert sorted(got) == sorted(trained)
    for name, gradient in got.items():
        assert torch.equal(gradient, wanted[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_a_gpu_computes_the_same(name: str) -> None:
    model = build(CONFIGS[name]).to("cuda", torch.bfloat16)
    loss = model(*(part.cuda() for part in batch()))
    loss.backward()
    wanted, gradients = train_once(build(CONFIGS[name]))  # in fp32
    torch.testing.assert_close(loss.cpu(), wanted, rtol=0.02, atol=0.0)
    for own_name, parameter in model.named_parameters():
        error = torch.linalg.vector_norm(parameter.grad.cpu().float() - gradients[own_name])
        assert error < 0.1 * torch.linalg.vector_norm(gradients[own_name]), own_name


SAMPLES, TOKENS = 3, 16
LENGTHS = (5, 1, 10, 16, 7, 9)


def draw() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    tokens, labels = torch.randint(101, (2, SAMPLES, TOKENS), generator=generator)
    return tokens, labels, torch.rand(SAMPLES, TOKENS, generator=generator)


def positions() -> Tensor:
    return torch.cat([torch.arange(length) for length in LENGTHS]).view(SAMPLES, TOKENS)


@pytest.mark.slow("trains a step")
@pytest.mark.parametrize(
    ("name", "variant"),
    [
        *((name, "none") for name in ("mha", "odd ffn, wide heads", "llama3 by 8")),
        *(("gqa of 2", name) for name in ("selective", "uniform, 1", "uniform, 2, attention kept")),
        ("llama3 by 8", "uniform, 2 and what is left"),
    ],
)
def test_documents_apart_are_documents_alone(name: str, variant: str) -> None:
    model = recomputing(variant, CONFIGS[name])
    parts = [part.reshape(-1).split(LENGTHS) for part in draw()]
    losses = [model(*(part[None] for part in document)) for document in zip(*parts, strict=True)]
    alone = torch.stack(losses).sum()
    alone.backward()
    expected = taken_gradients(model)
    packed = model(*draw(), positions_BS=positions(), document_lengths=LENGTHS)
    packed.backward()
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=0.0)
    for parameter, gradient in taken_gradients(model).items():
        torch.testing.assert_close(gradient, expected[parameter], rtol=1e-4, atol=1e-5)


def test_attention_alone_and_positions_alone_are_reset() -> None:
    """Positions continue, or every document still attends to earlier ones in its sample."""
    model = build(CONFIGS["gqa of 2"])
    ours = model(*draw(), document_lengths=LENGTHS)
    model.core = lambda qkv, *_: attention_by_definition(*qkv, LENGTHS)[0].float()
    torch.testing.assert_close(ours, model(*draw()), rtol=1e-5, atol=0.0)
    model = build(CONFIGS["mha"])
    plain, reset = model(*draw()), model(*draw(), positions_BS=positions())
    counted = model(*draw(), positions_BS=torch.arange(TOKENS).expand(SAMPLES, TOKENS))
    torch.testing.assert_close(counted, plain, rtol=1e-6, atol=0.0)
    assert not torch.isclose(reset, plain, rtol=1e-3)


@pytest.mark.parametrize("name", ["gqa of 2", "odd ffn, wide heads"])
def test_no_score_between_documents_is_computed(name: str) -> None:
    config = CONFIGS[name]
    model = build(config)
    alone = [length * flops_per_token(config, length, causal=False) for length in LENGTHS]
    packed = {"positions_BS": positions(), "document_lengths": LENGTHS}
    assert flops_of(lambda: model(*draw(), **packed).backward()) == sum(alone)
