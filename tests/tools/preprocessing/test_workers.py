"""Results come in order, and tasks are read as results are taken."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tools.preprocessing.workers import TASKS_PER_WORKER, worker_processes


def slow_if_even(number: int) -> int:
    time.sleep(0.02 * (number % 2 == 0))
    return number * number


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
