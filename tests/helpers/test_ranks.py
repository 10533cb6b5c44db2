"""The helper that runs functions on ranks: results, failures, reuse."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import RankError, run_ranks

pytestmark = pytest.mark.ranks


def _place_and_sum(weight: float) -> tuple[int, int, torch.Tensor]:
    total = torch.tensor([weight * (dist.get_rank() + 1)])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total


@pytest.mark.parametrize("world_size", [1, 2, 6, 8])
def test_results_come_by_rank(world_size: int) -> None:
    results = run_ranks(_place_and_sum, world_size, weight=0.5)

    assert [(rank, size) for rank, size, _ in results] == [
        (r, world_size) for r in range(world_size)
    ]
    expected = torch.tensor([0.25 * world_size * (world_size + 1)])
    assert all(torch.equal(total, expected) for _, _, total in results)


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


def _unpicklable() -> object:
    return lambda: None


def test_a_result_that_cannot_be_pickled_is_a_failure() -> None:
    with pytest.raises(RankError, match=r"rank [01] of 2 failed\n(.*\n)*.*pickle"):
        run_ranks(_unpicklable, 2)


def test_a_function_that_cannot_be_imported_is_refused() -> None:
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        run_ranks(lambda: None, 2)


def test_processes_are_used_again() -> None:
    first = run_ranks(os.getpid, 8)

    assert run_ranks(os.getpid, 8) == first
    assert run_ranks(os.getpid, 2) == first[:2]
    assert len({os.getpid(), *first}) == 9


def _draw() -> tuple[int, float]:
    return torch.get_num_threads(), torch.rand(1).item()


def test_each_call_starts_alike() -> None:
    first = run_ranks(_draw, 2)

    assert first[0] == first[1]
    assert first[0][0] == 1
    assert run_ranks(_draw, 2) == first


def _initialize_and_leave_to_the_pool() -> tuple[bool, int, str]:
    before = dist.is_initialized()
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    return before, int(total.item()), os.environ["LOCAL_WORLD_SIZE"]


def test_a_function_may_initialize_the_group_itself() -> None:
    for _ in range(2):  # the second call shows that the first group is gone
        results = run_ranks(_initialize_and_leave_to_the_pool, 3, init=False)
        assert results == [(False, 3, "3")] * 3
