"""The helper that runs functions on ranks: results, failures, reuse."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.end_to_end.test_training import RUN, run_main
from tests.helpers.ranks import RankError, run_ranks

pytestmark = pytest.mark.ranks


def _place_and_sum(weight: float) -> tuple[int, int, torch.Tensor]:
    total = torch.tensor([weight * (dist.get_rank() + 1)])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total


def _fail_on(failing: int) -> None:
    if dist.get_rank() == failing:
        raise ValueError("on purpose")
    dist.barrier()


def _leave_on(leaving: int) -> None:
    if dist.get_rank() == leaving:
        os._exit(7)
    dist.barrier()


def _hang_on(hanging: int) -> None:
    if dist.get_rank() == hanging:
        threading.Event().wait()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_fail_on, r"rank 2 of 4 failed\n(.*\n)*.*_fail_on\n(.*\n)*ValueError: on purpose"),
        (_leave_on, "rank 2 of 4 failed\nthe process ended with 7"),
    ],
)
def test_a_failure_ends_the_call_at_once(function: Callable[[int], None], message: str) -> None:
    begin = time.monotonic()

    with pytest.raises(RankError, match=message):
        run_ranks(function, 4, 2)

    assert time.monotonic() - begin < 60, "the others were waited for"
    assert len(run_ranks(_place_and_sum, 4, 1.0)) == 4


def test_a_hanging_rank_is_named() -> None:
    run_ranks(_place_and_sum, 4, 1.0)  # so that the timeout covers the call and not the start

    with pytest.raises(RankError, match=r"of 4 ranks, no answer within 2\.0 s from 2 "):
        run_ranks(_hang_on, 4, 2, timeout=2.0)

    assert len(run_ranks(_place_and_sum, 4, 1.0)) == 4


def test_processes_are_used_again() -> None:
    first = run_ranks(os.getpid, 8)

    assert run_ranks(os.getpid, 8) == first
    assert run_ranks(os.getpid, 2) == first[:2]
    assert len({os.getpid(), *first}) == 9


def _threads_of_gloo() -> int:
    found = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            found += "gloo" in (task / "comm").read_text()
    return found


def test_workers_end_the_threads_of_trainings() -> None:
    """A script leaves them to the end of its process, and a worker goes on."""
    words = [*RUN, "--train-iters", 2, "--paro-strategy", "IIG", "--paro-group-size", 2]
    ended = run_ranks(run_main, 4, [str(word) for word in words], init=False)
    assert ended[0].mistake is None

    assert run_ranks(_threads_of_gloo, 4, init=False) == [0] * 4
