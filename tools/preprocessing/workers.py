"""Worker processes: results in the order of their tasks, few tasks in flight, no worker lost."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any, TypeVar

from paro.errors import UserError

Task = TypeVar("Task")
Result = TypeVar("Result")

TASKS_PER_WORKER = 4  # in flight at once: bounds memory, and keeps workers busy


class Workers:
    """Processes that map functions over tasks; without any, this process does."""

    # Each has a pipe of its own. A pool of the standard library has one for all results: whoever
    # is killed while it writes there leaves the others, and the reader, waiting for ever.

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self.count = max(1, len(pipes))
        self._pipes = pipes
        self._idle: SimpleQueue[Connection] = SimpleQueue()
        for pipe in pipes:
            self._idle.put(pipe)

    def map(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Yield results in order; `UserError` if a worker was killed."""
        if not self._pipes:
            yield from map(function, tasks)
            return
        waiting: deque[Future[Result]] = deque()
        with ThreadPoolExecutor(self.count) as threads:
            try:
                for task in tasks:
                    waiting.append(threads.submit(self._run, function, task))
                    if len(waiting) >= TASKS_PER_WORKER * self.count:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()

    def _run(self, function: Callable[[Task], Result], task: Task) -> Result:
        """Run a task in an idle worker; raises what the function raises there."""
        pipe = self._idle.get()
        try:
            pipe.send((function, task))
            is_result, value = pipe.recv()
        except (EOFError, OSError) as error:
            raise UserError(
                "a worker process was killed, by the system if memory ran out: try again, with "
                "fewer --workers if it was memory"
            ) from error
        finally:
            self._idle.put(pipe)
        if is_result:
            return value
        raise value


@contextmanager
def worker_processes(
    count: int, prepare: Callable[..., Any], *arguments: object
) -> Iterator[Workers]:
    """Start `count` processes, each of which calls `prepare` first; none if it is 1."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each worker uses one core
    if count == 1:
        yield Workers(())
        return
    # Spawned, not forked: tokenizer libraries keep threads that do not survive a fork.
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for _ in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, prepare, arguments), daemon=True)
            process.start()
            there.close()  # else no end of the worker would be seen
            pipes.append(here)
            processes.append(process)
        yield Workers(pipes)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _serve(pipe: Connection, prepare: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    """Run tasks that arrive in a worker's pipe until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends the others
    threading.Thread(target=_leave_with_the_first, daemon=True).start()
    prepare(*arguments)
    with suppress(EOFError):
        while True:
            function, task = pipe.recv()
            try:
                reply = True, function(task)
            except Exception as error:
                error.add_note(traceback.format_exc())
                reply = False, error
            pipe.send(reply)


def _leave_with_the_first() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only called in a worker"
    wait([parent.sentinel])
    os._exit(1)
