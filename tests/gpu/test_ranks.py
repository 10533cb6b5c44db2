"""NCCL ranks that share one GPU train as one process does, under every strategy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from paro.distributed import groups
from paro.distributed.comm_stream import CommStreams
from paro.distributed.control import Control
from paro.strategy import legal_letters
from tests.helpers.rank_threads import run_rank_threads
from tests.helpers.ranks import RankError, run_ranks, stop_ranks
from tests.helpers.training import ADAM_EPS, TINY, Allowed, Trained, assert_same, train

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
    """Train the cases on threads as ranks, by the code of NCCL ranks; return results by rank."""

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


Record = Callable[[str, object], None]  # of pytest: into the JUnit report

ROTATED = "--paro-strategy IIG --paro-materialize rotate"
HO_RING = "--paro-collective ho-ring"
MUON = "--optimizer muon --muon-fp32-matmul-prec highest"  # in bf16 rounding grows too large
SHARED = "--context-parallel-size"
IN_BF16 = "--bf16 --kv-channels 16 --seq-length 16"  # for kernels that compute attention in parts
IN_ORDER = "--paro-nccl-launch-order implicit"
GROUPS = {  # of cases; the first of them are the least sure
    "Muon": [f"{MUON} --paro-strategy {letters}" for letters in ("NNN", "IIG", "GGG")],
    "samples": [
        f"--paro-strategy IIG {SHARED} 2 --cp-comm-type a2a",
        *(
            f"{IN_BF16} --paro-strategy {letters} {SHARED} {size} --cp-comm-type {way}"
            for way in ("p2p", "allgather")
            for letters, size in (("IIG", 2), ("GGG", 4))
        ),
    ],
    "in order": [f"--paro-strategy GGG {IN_ORDER}"],
    "ways": [
        *(f"--paro-strategy {letters} {HO_RING}" for letters in ("GGG", "NIG", "NNN")),
        "--paro-strategy GGG --paro-collective flat",
        ROTATED,
        f"{ROTATED} --paro-rotate-in-place",
        "--paro-strategy IIG --recompute-granularity full",
    ],
    "strategies": [f"--paro-strategy {letters}" for letters in legal_letters()],
}
# Kernels choose other orders of summation for other shapes. In bf16 parameters move by rounding.
ON_GPU = Allowed(movement=1e-3, scalar=1e-5)
ALLOWED = {MUON: ON_GPU, IN_BF16: Allowed(movement=0.12, scalar=0.02), "": ON_GPU}


def check(backend: str, cases: list[str]) -> None:
    found = on_ranks(train_cases, RANKS, backend, cases, timeout=400.0)
    compare_all(found, backend, cases)


def compare_all(found: list[list[Trained]], backend: str, cases: list[str]) -> None:
    """With one process that has the first flags of a case, those of `ALLOWED`."""
    of_cases = [next(filter(case.startswith, ALLOWED)) for case in cases]
    flags = [*dict.fromkeys(of_cases)]
    alone = dict(zip(flags, train_cases(backend, flags), strict=True))
    for rank, of_rank in enumerate(found):
        for case, own, trained in zip(cases, of_cases, of_rank, strict=True):
            assert_same(trained, alone[own], f"rank {rank}: {case}", ALLOWED[own])


@pytest.mark.gpu
@pytest.mark.timeout(450)
@pytest.mark.parametrize("group", GROUPS)
def test_ranks_on_one_gpu_train_as_one_process_does(record_property: Record, group: str) -> None:
    cases = GROUPS[group]
    if IN_ORDER in cases[0]:
        stop_ranks()  # NCCL reads its variables once in a process
    try:
        check("nccl", cases)
    except NcclRefusedError as refusal:
        record_property("note", f"{refusal}; {RANKS} threads of one process were the ranks")
        compare_all(train_on_threads(torch.device("cuda"), cases), "nccl", cases)
    finally:
        if IN_ORDER in cases[0]:
            stop_ranks()


@pytest.mark.verify
@pytest.mark.ranks
def test_the_same_on_cpu_ranks() -> None:
    some = {"Muon": (1, 2), "samples": (0, 2, 3), "ways": (1, 4), "strategies": (0,)}
    check("gloo", [GROUPS[group][place] for group, places in some.items() for place in places])
