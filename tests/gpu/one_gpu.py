"""Training on NCCL ranks that share one GPU, or on gloo ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist

from paro.distributed import groups
from paro.distributed.comm_stream import CommStreams
from paro.distributed.control import Control
from tests.helpers.comparison import ADAM_EPS
from tests.helpers.rank_threads import run_rank_threads
from tests.helpers.ranks import RankError, run_ranks
from tests.helpers.training import TINY, Trained, train

Result = TypeVar("Result")
Change = Callable[[CommStreams, torch.device], CommStreams]

RANKS, GROUP_SIZE = 4, 2
STEPS = f"{TINY} {ADAM_EPS} --train-iters 3 --global-batch-size 8"


class NcclRefusedError(Exception):
    """NCCL accepts only one rank on a GPU; the text is one line."""


def on_ranks(
    function: Callable[..., Result], world_size: int, *args: Any, timeout: float
) -> list[Result]:
    """`run_ranks`; `NcclRefusedError` if NCCL refuses to share a GPU."""
    try:
        return run_ranks(function, world_size, *args, timeout=timeout)
    except RankError as failure:
        refusals = [line for line in str(failure).splitlines() if "Duplicate GPU" in line]
        if not refusals:
            raise
    version = ".".join(map(str, torch.cuda.nccl.version()))
    raise NcclRefusedError(
        f"NCCL {version} refuses several ranks on one GPU, although each has its own NCCL_HOSTID: "
        f"{refusals[0]}"
    )


def flags_of(backend: str, more: str) -> str:
    return (
        f"{STEPS.replace('--distributed-backend gloo', f'--distributed-backend {backend}')} {more}"
    )


def train_cases(backend: str, cases: Sequence[str]) -> list[Trained]:
    """Trains the cases one after the other on all ranks; parameters come back on the CPU."""
    group_size = GROUP_SIZE if dist.is_initialized() else None
    if backend == "nccl" and dist.is_initialized():
        _share_the_gpu()
    return [_on_cpu(train(flags_of(backend, more), group_size=group_size)) for more in cases]


def train_on_threads(device: torch.device, cases: Sequence[str]) -> list[list[Trained]]:
    """The same on ranks that are threads of this process, on the code of NCCL ranks; by rank."""

    def train_all(control: Control) -> list[Trained]:
        return [
            _on_cpu(train(flags_of("nccl", more), group_size=GROUP_SIZE, control=control))
            for more in cases
        ]

    return run_rank_threads(train_all, RANKS, device)


def _on_cpu(trained: Trained) -> Trained:
    parameters = {name: value.cpu() for name, value in trained.parameters.items()}
    return replace(trained, parameters=parameters)


def _share_the_gpu() -> None:
    """Lets NCCL accept several ranks on one GPU: as if each had a machine of its own."""
    torch.cuda.set_device(0)
    os.environ["NCCL_HOSTID"] = f"rank-{dist.get_rank()}"
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # from NCCL 2.30
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"


@contextmanager
def changed_streams(change: Change) -> Iterator[None]:
    """Every training built in the block gets its comm streams through `change`."""
    make = groups.CudaStreams

    def changed() -> CommStreams:
        return change(make(), torch.device("cuda", torch.cuda.current_device()))

    with patch.object(groups, "CudaStreams", changed):
        yield
