"""Initial values: independent of sharding, with the right spread, by a fixed rule."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from model.initialization import (
    BLOCK,
    ParameterInit,
    initial_values,
    initialize_whole,
    parameter_initializers,
)
from model.llama import Llama
from tests.model.values import SMALL

SEVERAL_BLOCKS = ParameterInit(name="blocks.0.wq", numel=2 * BLOCK + 1001, std=0.02)


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize(
    "cuts",
    [
        [1],
        [BLOCK],
        [BLOCK - 1, BLOCK + 1],
        [7, 8, BLOCK // 2, 2 * BLOCK, 2 * BLOCK + 1000],
        [0, 5, 5],  # empty pieces
    ],
)
def test_pieces_by_any_number_of_threads_are_those_of_the_whole(
    cuts: list[int], num_threads: int
) -> None:
    whole = initial_values(SEVERAL_BLOCKS, 1, 0, SEVERAL_BLOCKS.numel)
    bounds = [0, *cuts, SEVERAL_BLOCKS.numel]

    pieces = [
        initial_values(SEVERAL_BLOCKS, 1, low, high, num_threads=num_threads)
        for low, high in pairwise(bounds)
    ]

    assert torch.equal(torch.cat(pieces), whole)


def test_the_rule_of_seeds_stays() -> None:
    """A change of the rule changes the loss curve of every --seed."""
    spec = ParameterInit(name="blocks.3.w_up", numel=BLOCK + 20, std=1.0)

    first, last = initial_values(spec, 1234, 0, 3), initial_values(spec, 1234, BLOCK, BLOCK + 3)

    wanted_first = torch.tensor([1.0209452, -0.7691444, 0.0403610])
    wanted_last = torch.tensor([0.5105639, -0.9103844, -0.3114735])
    torch.testing.assert_close(first, wanted_first, rtol=0, atol=1e-6)
    torch.testing.assert_close(last, wanted_last, rtol=0, atol=1e-6)


def test_every_parameter_seed_and_place_has_its_own_values() -> None:
    ours = initial_values(SEVERAL_BLOCKS, 1, 0, 100)
    other = replace(SEVERAL_BLOCKS, name="blocks.0.wk")
    for spec, seed, at in ((other, 1, 0), (SEVERAL_BLOCKS, 2, 0), (SEVERAL_BLOCKS, 1, BLOCK)):
        assert not torch.isclose(initial_values(spec, seed, at, at + 100), ours).any()


def test_values_are_normal() -> None:
    values = initial_values(SEVERAL_BLOCKS, 1, 0, SEVERAL_BLOCKS.numel).double() / 0.02
    error = 1.0 / math.sqrt(values.numel())

    assert abs(values.mean()) < 4 * error
    assert abs(values.square().mean() - 1.0) < 4 * math.sqrt(2.0) * error
    assert abs((values.abs() < 1.0).double().mean() - 0.6827) < 4 * 0.47 * error
    assert values.abs().max() > 3.5, "the tails are cut"


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


def test_drawing_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)

    initial_values(SEVERAL_BLOCKS, 1, 0, 100)

    assert torch.equal(torch.rand(1), expected)
