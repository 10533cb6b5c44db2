"""Ranks as threads train as one process does, on the code of NCCL ranks."""

from __future__ import annotations

import pytest
import torch

from paro.distributed.control import Control
from tests.gpu.one_gpu import flags_of, train_on_threads
from tests.gpu.test_ranks import GROUPS, HO_RING, ROTATED, compare_all
from tests.helpers.comparison import assert_same
from tests.helpers.rank_threads import run_rank_threads
from tests.helpers.ranks import RankError
from tests.helpers.training import train

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "more", ["--paro-strategy IIG", f"--paro-strategy GGG {HO_RING}", f"{ROTATED}"]
)
def test_threads_train_as_one_process_does(more: str) -> None:
    alone = train(flags_of("gloo", ""))
    flags = flags_of("nccl", more)
    for found in run_rank_threads(lambda on: train(flags, group_size=2, control=on), 4, CPU):
        assert_same(found, alone, more)


@pytest.mark.slow("trains on 4 threads, and on none")
@pytest.mark.parametrize(
    ("group", "place"), [("Muon", 2), ("samples", 0), ("samples", 2), ("samples", 3)]
)
def test_threads_exchange_what_other_cases_do(group: str, place: int) -> None:
    """Messages of Muon to some ranks and from others, a ring's, all-gathers, and all-to-alls."""
    case = GROUPS[group][place]
    compare_all(train_on_threads(CPU, [case]), "gloo", [case])


def test_the_first_failure_ends_all() -> None:
    def fail(control: Control) -> None:
        if control.world.rank == 2:
            raise ValueError("no third rank")
        control.barrier()

    with pytest.raises(RankError, match="no third rank"):
        run_rank_threads(fail, 4, CPU)
