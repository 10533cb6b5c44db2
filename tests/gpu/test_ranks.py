"""NCCL ranks that share one GPU train as one process does, under every strategy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paro.strategy import legal_letters
from tests.gpu.one_gpu import RANKS, NcclRefusedError, on_ranks, train_cases, train_on_threads
from tests.helpers.comparison import Allowed, assert_same
from tests.helpers.ranks import stop_ranks
from tests.helpers.training import Trained

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
