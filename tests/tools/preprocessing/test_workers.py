"""Results come in order, tasks are read as results are taken, and a lost worker is reported."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.helpers.refusals import refused
from tools.preprocessing.workers import TASKS_PER_WORKER, worker_processes


def slow_if_even(number: int) -> int:
    time.sleep(0.02 * (number % 2 == 0))
    return number * number


def die(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def fail(number: int) -> int:
    raise ValueError(f"task {number}")


@pytest.mark.process
def test_order_and_how_far_ahead_tasks_are_taken() -> None:
    taken = 0

    def tasks() -> Iterator[int]:
        nonlocal taken
        for number in range(60):
            taken += 1
            yield number

    with worker_processes(2, int) as workers:
        ahead = []
        for number, result in enumerate(workers.map(slow_if_even, tasks())):
            assert result == number * number
            ahead.append(taken - number)
    assert len(ahead) == 60
    assert max(ahead) <= 2 * TASKS_PER_WORKER
    with worker_processes(1, int) as workers:
        assert list(workers.map(slow_if_even, range(3))) == [0, 1, 4]


@pytest.mark.process
def test_a_killed_worker_is_a_clear_error() -> None:
    with worker_processes(2, int) as workers:
        refused(lambda: list(workers.map(die, range(100))), "a worker process was killed")


@pytest.mark.process
def test_an_error_in_a_worker_is_raised_here() -> None:
    with worker_processes(2, int) as workers, pytest.raises(ValueError, match="task 0"):
        list(workers.map(fail, range(100)))
