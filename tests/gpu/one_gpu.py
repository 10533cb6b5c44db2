"""Training on NCCL ranks that share one GPU, or on gloo ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch
import torch.distributed as dist

from paro.distributed.comm_stream import CommStreams
from paro.training import assembly
from tests.helpers.training import TINY, Trained, train

RANKS, GROUP_SIZE = 4, 2
STEPS = f"{TINY} --train-iters 3 --global-batch-size 8"


def flags_of(backend: str, more: str) -> str:
    return (
        f"{STEPS.replace('--distributed-backend gloo', f'--distributed-backend {backend}')} {more}"
    )


def train_cases(backend: str, cases: Sequence[str]) -> list[Trained]:
    """Trains the cases one after the other on all ranks; parameters come back on the CPU."""
    group_size = GROUP_SIZE if dist.is_initialized() else None
    if backend == "nccl" and dist.is_initialized():
        _share_the_gpu()
    found = [train(flags_of(backend, more), group_size=group_size) for more in cases]
    return [
        replace(one, parameters={name: value.cpu() for name, value in one.parameters.items()})
        for one in found
    ]


def _share_the_gpu() -> None:
    """Lets NCCL accept several ranks on one GPU: as if each had a machine of its own."""
    torch.cuda.set_device(0)
    os.environ["NCCL_HOSTID"] = f"rank-{dist.get_rank()}"
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # from NCCL 2.30
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"


@contextmanager
def changed_streams(
    change: type[CommStreams],
) -> Iterator[None]:
    """Every training built in the block gets its comm streams through `change`."""
    made = assembly.make_comm_streams
    with patch.object(
        assembly, "make_comm_streams", lambda *args, **more: change(made(*args, **more))
    ):
        yield
