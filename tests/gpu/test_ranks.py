"""NCCL ranks that share one GPU train as one process does, under every strategy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paro.strategy import legal_letters
from tests.gpu.one_gpu import RANKS, NcclRefusedError, on_ranks, train_cases, train_on_threads
from tests.helpers.comparison import Allowed, assert_same
from tests.helpers.training import Trained

Record = Callable[[str, object], None]  # of pytest: into the JUnit report

ROTATED = "--paro-strategy IIG --paro-materialize rotate"
HO_RING = "--paro-collective ho-ring"
MUON = "--optimizer muon --muon-fp32-matmul-prec highest"  # in bf16 rounding grows too large
OF_ADAMW = [
    *(f"--paro-strategy {letters}" for letters in legal_letters()),
    *(f"--paro-strategy {letters} {HO_RING}" for letters in ("GGG", "NIG", "NNN")),
    "--paro-strategy GGG --paro-collective flat",
    ROTATED,
    f"{ROTATED} --paro-rotate-in-place",
    "--paro-strategy IIG --recompute-granularity full",
    "--paro-strategy IIG --context-parallel-size 2 --cp-comm-type a2a",
]
OF_MUON = [f"{MUON} --paro-strategy {letters}" for letters in ("NNN", "IIG", "GGG")]
CASES = OF_ADAMW + OF_MUON
# Kernels choose other orders of summation for other shapes.
ON_GPU = Allowed(movement=1e-3, scalar=1e-5)


def check(backend: str, cases: list[str]) -> None:
    found = on_ranks(train_cases, RANKS, backend, cases, timeout=400.0)
    compare_all(found, backend, cases)


def compare_all(found: list[list[Trained]], backend: str, cases: list[str]) -> None:
    adamw, muon = train_cases(backend, ["", MUON])
    for rank, of_rank in enumerate(found):
        for case, trained in zip(cases, of_rank, strict=True):
            alone = muon if MUON in case else adamw
            assert_same(trained, alone, f"rank {rank}: {case}", ON_GPU)


@pytest.mark.gpu
@pytest.mark.timeout(450)
def test_ranks_on_one_gpu_train_as_one_process_does(record_property: Record) -> None:
    try:
        check("nccl", CASES)
    except NcclRefusedError as refusal:
        record_property("note", f"{refusal}; {RANKS} threads of one process were the ranks")
        compare_all(train_on_threads(torch.device("cuda"), CASES), "nccl", CASES)


@pytest.mark.verify
@pytest.mark.ranks
def test_the_same_on_cpu_ranks() -> None:
    cases = [CASES[0], f"--paro-strategy NIG {HO_RING}", ROTATED, OF_ADAMW[-1], *OF_MUON[1:]]
    check("gloo", cases)
