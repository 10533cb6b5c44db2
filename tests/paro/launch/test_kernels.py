"""Ranks that see different kernels use the same, and say which rank lacks which."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from paro.distributed.control import Control
from paro.distributed.world import World
from paro.launch.setup import agree_on_kernels
from paro.training.assembly import build_training
from paro.training.replicas import check_replicas
from tests.helpers.flags import configured
from tests.helpers.ranks import run_ranks
from tests.helpers.training import TINY, run_steps
from tests.helpers.triton_kernels import interpreter, skip_on_gpus

pytestmark = pytest.mark.bits

FLAGS = f"{TINY} --train-iters 2 --global-batch-size 2 --paro-strategy NNN"


def trained_with(*, ranks_with_triton: tuple[int, ...]) -> list[str]:
    """Trains replicas where only some ranks have Triton; the lines about kernels."""
    world = World(rank=dist.get_rank(), size=dist.get_world_size(), ranks_per_node=2)
    config, control = configured(FLAGS, world), Control(world, torch.device("cpu"))
    with interpreter() if world.rank in ranks_with_triton else nullcontext():
        agreed, lines = agree_on_kernels(config, control)
        training = build_training(agreed, control)
        run_steps(agreed, training)
        check_replicas(training, iteration=2)
        training.close()
    return lines


@pytest.mark.ranks
def test_all_use_torchs_operations_where_a_rank_lacks_triton() -> None:
    skip_on_gpus()
    for lines in run_ranks(trained_with, 2, ranks_with_triton=(1,)):
        assert lines[0].startswith("> attention: auto")
        for line, what in zip(
            lines[1:], ("norms, SwiGLU, rotary embedding and loss", "AdamW"), strict=True
        ):
            assert line.startswith("> WARNING: ranks differ: nothing on rank 0, " + what)
            assert line.endswith(" on rank 1: all use torch's operations")


@pytest.mark.ranks
def test_nothing_is_said_where_all_have_the_same() -> None:
    skip_on_gpus()
    for ranks in ((), (0, 1)):
        for lines in run_ranks(trained_with, 2, ranks_with_triton=ranks):
            assert len(lines) == 1 + len(ranks)
            assert not any("WARNING" in line for line in lines)


def test_muons_kernels_are_named() -> None:
    skip_on_gpus()
    with interpreter():
        config = configured(f"{FLAGS} --optimizer muon --no-rope-fusion", World())
        _, lines = agree_on_kernels(config, Control(World(), torch.device("cpu")))
    (update,) = (line for line in lines if "AdamW: Triton" in line)
    assert "Muon: momentum in one pass and symmetric products by Triton" in update
