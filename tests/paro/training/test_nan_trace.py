"""--trace-nan names where a step's first infinity or NaN comes from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from paro.training.step import Training, train_step
from tests.helpers.ranks import run_ranks
from tests.helpers.training import TINY, begun, built

FLAGS = f"{TINY} --global-batch-size 4 --train-iters 3 --trace-nan"
FP8 = (
    "--bf16 --fp8-format hybrid --hidden-size 32 --ffn-hidden-size 32 --seq-length 16 "
    "--global-batch-size 4"
)
Plant = Callable[[Training], object]


def traced(flags: str, plant: Plant) -> str | None:
    """The origin that a step names after a fault was planted; the step before is fine."""
    config, training = built(flags)
    state, source = begun(config, training)
    assert train_step(training, state, source).origin is None
    plant(training)
    step = train_step(training, state, source)
    assert step.skipped
    training.close()
    return step.origin


def block(training: Training, layer: int) -> nn.Module:
    return training.model.model.get_submodule(f"blocks.{layer}")


def spoil_forward(training: Training) -> None:
    block(training, 2).register_forward_hook(lambda _, inputs, output: output * math.inf)


def spoil_backward(training: Training) -> None:
    def spoil(_: nn.Module, inputs: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: grad / 0.0)

    block(training, 1).register_forward_hook(spoil)


def overflow(training: Training) -> None:
    """Gate and up projections of about 1e30, whose product overflows."""
    for part in training.optimizer._parts.values():
        for shard in part.flat_shards():
            for each in shard.layout.chunk_ranges(shard.start, shard.start + shard.values.numel()):
                if each.chunk.name == "blocks.1.mlp_norm":
                    begin = each.offset - shard.start
                    shard.values[begin : begin + each.high - each.low] = 1e30
        part.write_params()


def spoil_a_parameter(training: Training) -> None:
    part = next(iter(training.optimizer._parts.values()))
    part.master.detach().fill_(math.nan)
    part.write_params()


PLANTS: dict[str, tuple[Plant, str]] = {
    "forward": (spoil_forward, "forward of blocks.2: mul"),
    "backward": (spoil_backward, "backward of blocks.2: div"),
    "overflow": (overflow, "forward of blocks.1: mul"),
    "parameter": (spoil_a_parameter, "parameter embedding.weight"),
}


# Every fault with two of them without `verify`.
RUNS = ("", "--recompute-granularity full", "--bf16", FP8)
PAIRS = [
    pytest.param(kind, more, marks=[pytest.mark.verify] * ((i + j) % 2))
    for (i, kind), (j, more) in product(enumerate(PLANTS), enumerate(RUNS))
]


@pytest.mark.parametrize(("kind", "more"), PAIRS)
def test_the_unit_and_the_operation_are_named(kind: str, more: str) -> None:
    plant, origin = PLANTS[kind]
    assert traced(f"{FLAGS} {more}", plant) == f"rank 0: {origin}"


def trace_on_ranks(flags: Sequence[str]) -> list[str | None]:
    rank = torch.distributed.get_rank()
    return [traced(each, spoil_forward if rank == 1 else lambda _: None) for each in flags]


@pytest.mark.ranks
def test_the_rank_is_named() -> None:
    flags = [
        f"{FLAGS} --paro-group-size 2 {more}"
        for more in ("--paro-strategy IIG", "--paro-strategy III --paro-materialize rotate")
    ]
    for origins in run_ranks(trace_on_ranks, 4, flags):
        assert origins == ["rank 1: forward of blocks.2: mul"] * len(flags)
