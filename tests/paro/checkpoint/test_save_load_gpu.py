"""Shards on a GPU are saved from and loaded to it, with and without a process group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paro.sharding.buffers import FlatShard
from tests.helpers.parameters import load_parameters
from tests.paro.checkpoint.toy_run import (
    ONE,
    assert_true,
    load_checkpoint,
    make_shards,
    save_checkpoint,
)

pytestmark = pytest.mark.gpu


@pytest.fixture
def control_group() -> Iterator[None]:
    """The default group of a run under NCCL: gloo's, which moves no CUDA tensors."""
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def on_gpu(*, filled: bool) -> list[FlatShard]:
    shards = make_shards(ONE, 0, filled=filled)
    return [replace(shard, values=shard.values.cuda()) for shard in shards]


def assert_round_trip(root: Path) -> None:
    save_checkpoint(root, 100, on_gpu(filled=True), {})
    shards = on_gpu(filled=False)
    load_checkpoint(root, shards)
    assert all(shard.values.is_cuda for shard in shards)
    assert_true(shards)
    assert not any(tensor.is_cuda for tensor in load_parameters(root).values())


def test_round_trip_without_a_process_group(tmp_path: Path) -> None:
    assert_round_trip(tmp_path)


@pytest.mark.usefixtures("control_group")
def test_round_trip_beside_a_gloo_group(tmp_path: Path) -> None:
    assert_round_trip(tmp_path)
