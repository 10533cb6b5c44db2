"""Worker processes: results in the order of their tasks, few tasks in flight, no worker lost."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any, TypeVar

from paro.errors import UserError

Task = TypeVar("Task")
Result = TypeVar("Result")

TASKS_PER_WORKER = 4  # in flight at once: bounds memory, and keeps workers busy


class Workers:
    """Processes that map functions over tasks; without any, this process does."""

    def __init__(self, executor: ProcessPoolExecutor | None, count: int) -> None:
        self._executor = executor
        self.count = count

    def map(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Yield results in order; `UserError` if a worker was killed."""
        if self._executor is None:
            yield from map(function, tasks)
            return
        waiting: deque[Future[Result]] = deque()
        try:
            for task in tasks:
                waiting.append(self._executor.submit(function, task))
                if len(waiting) >= TASKS_PER_WORKER * self.count:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise UserError(
                "a worker process was killed, by the system if memory ran out: try again, with "
                "fewer --workers if it was memory"
            ) from error
        finally:
            for future in waiting:
                future.cancel()


@contextmanager
def worker_processes(
    count: int, prepare: Callable[..., Any], *arguments: object
) -> Iterator[Workers]:
    """Start `workers` processes, each of which calls `prepare` first; none if it is 1."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each worker uses one core
    if count == 1:
        yield Workers(None, 1)
        return
    # Spawned, not forked: tokenizer libraries keep threads that do not survive a fork.
    with ProcessPoolExecutor(
        count,
        multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(prepare, arguments),
    ) as executor:
        yield Workers(executor, count)


def _begin(prepare: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends the others
    threading.Thread(target=_leave_with_the_first, daemon=True).start()
    prepare(*arguments)


def _leave_with_the_first() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only called in a worker"
    wait([parent.sentinel])
    os._exit(1)
