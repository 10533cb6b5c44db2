"""Documents that share a sample give the same results as each document alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model.config import LlamaConfig, RecomputeConfig
from model.llama import Llama
from model.units import flops_per_token
from tests.model.test_llama import CONFIGS, build
from tests.model.values import attention_by_definition, flops_of

LENGTHS = (5, 1, 10, 16, 7, 9)  # of three samples of 16 tokens
SAMPLES = 3
S = 16


def draw() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    tokens, labels = torch.randint(101, (2, SAMPLES, S), generator=generator)
    return tokens, labels, torch.rand(SAMPLES, S, generator=generator)


def positions() -> Tensor:
    return torch.cat([torch.arange(length) for length in LENGTHS]).view(SAMPLES, S)


def gradients(model: Llama) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found[name], parameter.grad = parameter.grad, None
    return found


def one_by_one(model: Llama) -> Tensor:
    """The loss of every document in a separate pass."""
    parts = [part.reshape(-1).split(LENGTHS) for part in draw()]
    losses = [model(*(part[None] for part in document)) for document in zip(*parts, strict=True)]
    return torch.stack(losses).sum()


@pytest.mark.parametrize("name", ["mha", "gqa of 2", "odd ffn, wide heads", "llama3 by 8"])
@pytest.mark.parametrize(
    "recompute",
    [None, RecomputeConfig(granularity="selective"), RecomputeConfig(granularity="full"),
     RecomputeConfig(granularity="full", num_layers=2),
     RecomputeConfig(granularity="full", num_layers=2, keeps_core=True)],
    ids=["kept", "selective", "full", "full by 2", "full by 2 but attention"],
)  # fmt: skip
def test_documents_apart_are_documents_alone(name: str, recompute: RecomputeConfig | None) -> None:
    config: LlamaConfig = replace(CONFIGS[name], recompute=recompute)
    model = build(config)
    alone = one_by_one(model)
    alone.backward()
    expected = gradients(model)

    packed = model(*draw(), positions_BS=positions(), document_lengths=LENGTHS)
    packed.backward()

    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=0.0)
    for parameter, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[parameter], rtol=1e-4, atol=1e-5)


def test_attention_alone_is_reset() -> None:
    """Positions continue if only the attention mask is reset."""
    model = build(CONFIGS["gqa of 2"])
    ours = model(*draw(), document_lengths=LENGTHS)
    model.core = lambda qkv, *_: attention_by_definition(*qkv, LENGTHS)[0].float()
    torch.testing.assert_close(ours, model(*draw()), rtol=1e-5, atol=0.0)


def test_positions_alone_are_reset() -> None:
    """Every document still attends to earlier ones in its sample."""
    model = build(CONFIGS["mha"])
    tokens, labels, weights = draw()
    plain = model(tokens, labels, weights)
    reset = model(tokens, labels, weights, positions_BS=positions())
    counted = model(tokens, labels, weights, positions_BS=torch.arange(S).expand(SAMPLES, S))
    torch.testing.assert_close(counted, plain, rtol=1e-6, atol=0.0)
    assert not torch.isclose(reset, plain, rtol=1e-3)
    changed = tokens.clone()
    changed[0, 0] = (changed[0, 0] + 1) % 101  # in the first document of the first sample
    only_last = torch.zeros_like(weights)
    only_last[0, -1] = 1.0
    same_positions = {"positions_BS": positions()}
    seen = model(changed, labels, only_last, **same_positions)
    assert not torch.isclose(seen, model(tokens, labels, only_last, **same_positions), rtol=1e-6)
    apart = {"document_lengths": LENGTHS}
    unseen = model(changed, labels, only_last, **apart)
    assert torch.equal(unseen, model(tokens, labels, only_last, **apart))


@pytest.mark.parametrize("name", ["mha", "gqa of 2", "odd ffn, wide heads"])
def test_no_score_between_documents_is_computed(name: str) -> None:
    config = CONFIGS[name]
    model = build(config)
    alone = [length * flops_per_token(config, length, causal=False) for length in LENGTHS]
    packed = {"positions_BS": positions(), "document_lengths": LENGTHS}
    assert flops_of(lambda: model(*draw(), **packed).backward()) == sum(alone)
