"""Adapters: sizes, initial values, what they compute and cost, and their dropout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from model.config import LlamaConfig, LoraConfig, down_name, is_adapter, targets_of, up_name
from model.initialization import initial_values, initialize_whole, parameter_initializers
from model.llama import Llama
from model.lora import AdaptedBlock, DropKey, keep_mask
from model.norm import SharedInput
from model.units import flops_per_token, parameter_shapes
from tests.helpers.refusals import refused
from tests.model.values import SMALL, flops_of

PLAIN = replace(SMALL, num_query_groups=2, vocab_size=48, add_qkv_bias=True)
ALL = targets_of("all-linear")


def adapted(rank: int = 3, targets: tuple[str, ...] = ALL, dropout: float = 0.0) -> LlamaConfig:
    return replace(PLAIN, lora=LoraConfig(rank=rank, alpha=6, targets=targets, dropout=dropout))


def filled(config: LlamaConfig) -> Llama:
    """A model with adapters that are not zero, all else frozen."""
    model = Llama(config)
    initialize_whole(model, config, seed=1)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data.normal_(std=0.1, generator=generator)
    model.freeze(is_adapter)
    return model


def loss_of(model: Llama, tokens_BS: Tensor, drops: DropKey | None = None) -> Tensor:
    loss: Tensor = model(tokens_BS, tokens_BS, torch.ones(tokens_BS.shape), drops=drops)
    return loss


def adapted_by_autograd(
    block: AdaptedBlock,
    name: str,
    output: Tensor,
    shared: SharedInput,
    sources: Sequence[Tensor],
    drops: DropKey | None,
) -> Tensor:
    """`AdaptedBlock.adapted` in plain words: autograd keeps everything."""
    lora = block.config.lora
    if name not in lora.targets:
        return output
    in_BSD = shared.make(*sources)
    if drops is not None and lora.dropout > 0.0:
        full = f"blocks.{block.layer}.{name}"
        kept = keep_mask(in_BSD.shape, lora.dropout, drops, full, in_BSD.device)
        in_BSD = in_BSD * kept / (1.0 - lora.dropout)
    down_RD, up_ER = getattr(block, down_name(name)), getattr(block, up_name(name))
    return output + lora.scaling * F.linear(F.linear(in_BSD, down_RD), up_ER)


@pytest.fixture(name="tokens_BS")
def tokens() -> Tensor:
    return torch.randint(48, (3, 24), generator=torch.Generator().manual_seed(3))


def test_it_equals_a_model_with_the_products_added_to_its_weights(tokens_BS: Tensor) -> None:
    config = adapted()
    model, merged = filled(config), Llama(PLAIN)
    weights = dict(model.named_parameters())
    for name, parameter in merged.named_parameters():
        parameter.data.copy_(weights[name])
        if f"{name}_lora_a" in weights:
            parameter.data += 2 * weights[f"{name}_lora_b"] @ weights[f"{name}_lora_a"]
    torch.testing.assert_close(loss_of(model, tokens_BS), loss_of(merged, tokens_BS))
    torch.testing.assert_close(model(tokens_BS), merged(tokens_BS))


@pytest.mark.parametrize("targets", ["q_proj,v_proj", "all-linear", "down_proj", "o_proj,up_proj"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_gradients_are_those_of_autograd_that_keeps_everything(
    tokens_BS: Tensor, targets: str, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = adapted(targets=targets_of(targets), dropout=dropout)
    grads = []
    drops = DropKey(1, 7, (0, 1, 2))
    for _ in range(2):
        model = filled(config)
        loss_of(model, tokens_BS, drops).backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
        assert all((p.grad is None) is not p.requires_grad for p in model.parameters())
        monkeypatch.setattr(AdaptedBlock, "adapted", adapted_by_autograd)
    ours, by_autograd = grads
    assert len(ours) == 2 * 2 * len(targets_of(targets))
    for name, grad in ours.items():
        torch.testing.assert_close(grad, by_autograd[name])
        assert grad.abs().sum() > 0


def test_a_part_of_tokens_and_columns_drops_what_the_whole_drops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("model.lora._AT_ONCE", 10)  # several runs in a range
    key, ranges = DropKey(1, 2, (3, 5)), (range(1, 3), range(6, 8))
    cpu = torch.device("cpu")
    whole = keep_mask(torch.Size((2, 8, 12)), 0.4, key, "w", cpu)
    some = torch.cat([whole[:, own.start : own.stop] for own in ranges], dim=1)
    for first, last, columns in ((0, 12, None), (0, 5, (0, 12)), (5, 12, (5, 12))):
        for own_key, all_columns in ((key, whole), (key._replace(ranges=ranges), some)):
            wanted = all_columns[..., first:last]
            found = keep_mask(wanted.shape, 0.4, own_key, "w", cpu, columns)
            assert torch.equal(found, wanted)


def test_frozen_weights_in_bf16_compute_what_their_values_do(tokens_BS: Tensor) -> None:
    config = replace(adapted(), qk_layernorm=True)
    in_bf16, rounded = filled(config), filled(config)
    for model in (in_bf16, rounded):
        for name, parameter in model.named_parameters():
            if not is_adapter(name):
                half = parameter.data.bfloat16()
                parameter.data = half if model is in_bf16 else half.float()
    in_bf16.freeze(is_adapter, activations=torch.float32)
    for first, second in zip(in_bf16(tokens_BS), rounded(tokens_BS), strict=True):
        assert torch.equal(first, second)
    for model in (in_bf16, rounded):
        loss_of(model, tokens_BS).backward()
    wanted = dict(rounded.named_parameters())
    for name, parameter in in_bf16.named_parameters():
        if is_adapter(name):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, wanted[name].grad), name


# Of the first block's attention a kernel computes all gradients or none, and so does the formula;
# with matrix products, as here, torch leaves out what q, k and v do not need.
@pytest.mark.parametrize(
    "targets", ["q_proj,k_proj,v_proj", "all-linear", "down_proj", "o_proj,up_proj", "gate_proj"]
)
def test_flops_are_those_that_torch_counts(
    tokens_BS: Tensor, targets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is computed again in backward does not count.
    monkeypatch.setattr(AdaptedBlock, "adapted", adapted_by_autograd)
    config = adapted(targets=targets_of(targets))
    model = filled(config)
    trained = frozenset(filter(is_adapter, parameter_shapes(config)))
    wanted = flops_per_token(config, 24, trained, causal=False) * tokens_BS.numel()
    assert flops_of(lambda: loss_of(model, tokens_BS).backward()) == wanted


def test_initial_values_are_those_of_peft() -> None:
    config = adapted(rank=8)
    specs, shapes = parameter_initializers(config), parameter_shapes(config)
    for name, shape in shapes.items():
        if not is_adapter(name):
            continue
        numel = math.prod(shape)
        values = initial_values(specs[name], 5, 0, numel)
        assert torch.equal(values[3:9], initial_values(specs[name], 5, 3, 9))
        if name.endswith("_lora_b"):
            assert values.abs().max() == 0
            continue
        bound = shape[1] ** -0.5
        assert values.abs().max() <= bound
        assert float(values.std()) == pytest.approx(bound / 3**0.5, rel=0.15)
        reference = torch.empty(2048, shape[1])
        torch.nn.init.kaiming_uniform_(reference, a=5**0.5)
        assert float(reference.abs().max()) == pytest.approx(bound, rel=0.01)
    plain = parameter_initializers(PLAIN)
    assert all(specs[name] == spec for name, spec in plain.items())


def mask(
    samples: tuple[int, ...], step: int = 3, name: str = "blocks.0.wq", seed: int = 1
) -> Tensor:
    shape = torch.Size((len(samples), 40, 25))
    return keep_mask(shape, 0.25, DropKey(seed, step, samples), name, torch.device("cpu"))


def test_a_sample_drops_the_same_in_any_micro_batch() -> None:
    together = mask((0, 1, 2, 3))
    assert torch.equal(together[2:], mask((2, 3)))
    assert torch.equal(together[1:2], mask((1,)))
    for other in (mask((4, 5, 6, 7)), mask((0, 1, 2, 3), step=4), mask((0, 1, 2, 3), seed=2)):
        assert 0.6 < (together == other).float().mean() < 0.65  # 0.75 ** 2 + 0.25 ** 2
    assert 0.6 < (together == mask((0, 1, 2, 3), name="blocks.1.wq")).float().mean() < 0.65


def test_dropout_scales_what_is_kept_and_stops_outside_training(tokens_BS: Tensor) -> None:
    model, plain = filled(adapted(dropout=0.5)), filled(adapted())
    whole, key = loss_of(plain, tokens_BS), DropKey(1, 1, (0, 1, 2))
    assert torch.equal(loss_of(model, tokens_BS), whole)
    assert not torch.equal(loss_of(model, tokens_BS, key), whole)
    for parameter in model.parameters():
        parameter.data.abs_()
    block, x_BSD, output = model.blocks[0], torch.ones(1, 4000, 16), torch.zeros(1, 4000, 16)
    whole = block.adapted_alone("wq", output, lambda x: x, (x_BSD,), None)
    part = block.adapted_alone("wq", output, lambda x: x, (x_BSD,), DropKey(1, 1, (0,)))
    torch.testing.assert_close(part.mean(1), whole.mean(1), rtol=0.03, atol=0.0)


def test_values_that_make_no_sense() -> None:
    refused(lambda: LoraConfig(rank=0), "--lora-rank 0 must be at least 1")
    refused(lambda: LoraConfig(rank=2, alpha=0.0), "--lora-alpha 0.0 must be a positive number")
    refused(lambda: LoraConfig(rank=2, alpha=math.inf), "--lora-alpha inf must be")
    refused(lambda: LoraConfig(rank=2, dropout=1.0), "--lora-dropout 1.0 must be ... below 1")
    refused(lambda: LoraConfig(rank=2, targets=("x",)), "adapters of x: there are")
    assert parameter_shapes(adapted(rank=8, targets=("wk",)))["blocks.0.wk_lora_a"] == (8, 16)
    wide = adapted(rank=9, targets=("wk",))
    refused(lambda: parameter_shapes(wide), "--lora-rank 9 ... 8 of wk")
    assert targets_of("v_proj,q_proj") == ("wq", "wv")
    refused(lambda: targets_of("q_proj,lm_head"), "'lm_head' ... give all-linear")
