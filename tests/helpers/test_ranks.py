"""The helper that runs functions on ranks: what a failure says, and that the next call works."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
import torch.distributed as dist

from tests.helpers.ranks import HANGS_AFTER, RankError, run_ranks

pytestmark = pytest.mark.ranks


def fail() -> None:
    raise ValueError("on purpose")


def leave() -> None:
    os._exit(7)


def hang() -> None:
    threading.Event().wait()


def on_one(what: Callable[[], None], failing: int) -> None:
    if dist.get_rank() == failing:
        what()
    if what is not hang:
        dist.barrier()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (fail, r"rank 2 of 4 failed\n(.*\n)*.*fail\n(.*\n)*ValueError: on purpose"),
        (leave, "rank 2 of 4 failed\nthe process ended with 7"),
        (hang, r"of 4 ranks, no answer within 2\.0 s from 2 "),
    ],
)
def test_a_failure_ends_the_call_and_not_the_next(what: Callable[[], None], message: str) -> None:
    assert len({*run_ranks(os.getpid, 4)}) == 4  # so that a timeout does not cover the start
    with pytest.raises(RankError, match=message):
        run_ranks(on_one, 4, what, 2, timeout=2.0 if what is hang else HANGS_AFTER)
    assert len({*run_ranks(os.getpid, 4)}) == 4
