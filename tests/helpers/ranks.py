"""Runs a function on N gloo ranks, whose processes are reused."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from io import BytesIO
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from paro.distributed.groups import Groups
from paro.sharding.distributed_model import DistributedModel
from tests.helpers.warm_process import HANGS_AFTER, warm_process

ROOT = Path(__file__).resolve().parents[2]

# After a failure: how long other ranks may still report an earlier one.
_LAST_WORDS_SECONDS = 1.0

Result = TypeVar("Result")


class RankError(AssertionError):
    """A rank failed, died or did not answer; the text has the first failure's traceback."""


def run_ranks(
    function: Callable[..., Result],
    world_size: int,
    /,
    *args: Any,
    init: bool = True,
    timeout: float = HANGS_AFTER,
    **kwargs: Any,
) -> list[Result]:
    """The results of `function(*args, **kwargs)` on each of `world_size` ranks, by rank.

    The function must be importable (top level of its module); function, arguments and results are
    pickled. By default it runs with the default gloo group initialized; with `init=False` it has
    only torchrun's environment and may initialize the group itself. Groups are destroyed
    afterwards. Processes are reused across calls, with 1 thread and torch's seed set to 0. If a
    rank fails, all are killed, so nothing hangs, and the next call starts new ones.
    """
    call = pickle.dumps((function, args, kwargs))
    replies = _POOL.run(call, world_size, init=init, timeout=timeout)
    return [pickle.loads(reply) for reply in replies]


def stop_ranks() -> None:
    """Ends the processes of earlier calls; libraries keep what they read from the environment."""
    _POOL.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """One call as sent to one rank."""

    call: bytes
    environment: dict[str, str]
    init: bool
    timeout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    """The outcome of a call on one rank."""

    result: bytes = b""
    failure: str | None = None
    ended: float  # on the machine-wide monotonic clock


@dataclass(frozen=True, slots=True)
class _Worker:
    process: BaseProcess
    pipe: connection.Connection


class _Pool:
    """The rank processes; grown on demand, all killed after a failure.

    They are forked from a server that has imported the common modules, so new ones start at once.
    """

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._store: dist.TCPStore | None = None
        atexit.register(self.stop, grace_seconds=5.0)  # in which coverage is saved

    def run(self, call: bytes, world_size: int, *, init: bool, timeout: float) -> list[bytes]:
        """The pickled results by rank."""
        try:
            self._grow(world_size)
            workers = self._workers[:world_size]
            # Owned here and new for every call, as in torchrun's agent: no port is guessed and no
            # key is used twice.
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            for rank, worker in enumerate(workers):
                environment = _torchrun_environment(rank, world_size, self._store.port)
                task = _Task(call=call, environment=environment, init=init, timeout=timeout)
                worker.pipe.send_bytes(pickle.dumps(task))
            results = _collect(workers, timeout)
            for worker in workers:
                worker.pipe.send_bytes(pickle.dumps(None))
        except BaseException:
            self.stop()
            raise
        return results

    def stop(self, *, grace_seconds: float = 0.0) -> None:
        """Ends every worker, at the latest after a grace; the next call starts new ones."""
        for worker in self._workers:
            worker.pipe.close()
        for worker in self._workers:
            if grace_seconds:
                worker.process.join(grace_seconds)
            worker.process.kill()
            worker.process.join()
        self._workers.clear()

    def _grow(self, num_workers: int) -> None:
        while len(self._workers) < num_workers:
            ours, theirs = multiprocessing.Pipe()
            process = warm_process(_serve, theirs, name="rank")
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours))


_POOL = _Pool()


def _torchrun_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",  # the machine's host name may not resolve
        "PYTEST_CURRENT_TEST": os.environ.get("PYTEST_CURRENT_TEST", ""),
    }


def _collect(workers: Sequence[_Worker], timeout: float) -> list[bytes]:
    """The results of all ranks; raises RankError soon after one has failed."""
    results = [b""] * len(workers)
    waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
    failures: list[tuple[float, str]] = []
    deadline = time.monotonic() + timeout
    while waiting:
        ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready and failures:
            break
        if not ready:
            _print_stacks(workers[rank] for rank in waiting.values())
            silent = ", ".join(map(str, waiting.values()))
            raise RankError(
                f"of {len(workers)} ranks, no answer within {timeout} s from {silent} "
                "(stacks on stderr)"
            )
        for pipe in ready:
            rank = waiting.pop(pipe)  # type: ignore[call-overload]
            reply = _receive(workers[rank])
            results[rank] = reply.result
            if reply.failure is not None:
                text = f"rank {rank} of {len(workers)} failed\n{reply.failure}"
                failures.append((reply.ended, text))
                # The failures that a dead rank causes may arrive before its own end is seen.
                deadline = min(deadline, time.monotonic() + _LAST_WORDS_SECONDS)
    if failures:
        raise RankError(min(failures)[1])
    return results


def _receive(worker: _Worker) -> _Reply:
    try:
        reply = pickle.loads(worker.pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        worker.process.join()
        # Its death made the others fail, so it counts as the first failure.
        return _Reply(failure=f"the process ended with {worker.process.exitcode}", ended=0.0)
    assert isinstance(reply, _Reply), f"a rank sent {reply!r}"
    return reply


def _print_stacks(workers: Iterator[_Worker]) -> None:
    for worker in workers:
        os.kill(worker.process.pid or 0, signal.SIGUSR1)
    time.sleep(0.5)  # while they print


def _serve(pipe: connection.Connection) -> None:
    """The loop of a worker: a call, its reply, permission to destroy the groups, the next call."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    gc.freeze()  # what it shares with the server, which is most, is not searched
    while True:
        try:
            task = pickle.loads(pipe.recv_bytes())
        except EOFError:  # the parent closed the pipe or is gone
            os._exit(0)  # without waiting for the threads of a training that failed
        if task is None:
            # Only now, after all ranks have answered: destroying groups earlier would break
            # connections that others still use.
            _close_trainings()
            if dist.is_initialized():
                dist.destroy_process_group()
            continue
        pipe.send_bytes(pickle.dumps(_answer(task)))


def _close_trainings() -> None:
    """Ends the threads of trainings that a script leaves to the end of its process.

    Autograd keeps their models alive, and idle gloo groups keep waking up: a worker that had run a
    hundred trainings took a third of a core.
    """
    for value in gc.get_objects():
        if issubclass(type(value), (DistributedModel, Groups)):
            value.close()


def _answer(task: _Task) -> _Reply:
    try:
        os.environ.update(task.environment)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        function, args, kwargs = pickle.loads(task.call)
        if task.init:
            dist.init_process_group("gloo", timeout=timedelta(seconds=task.timeout))
        result = _pickled(function(*args, **kwargs))
    except BaseException:
        # Keep the groups: destroying them would make the other ranks fail as well.
        return _Reply(failure=traceback.format_exc(), ended=time.monotonic())
    return _Reply(result=result, ended=time.monotonic())


def _pickled(result: object) -> bytes:
    buffer = BytesIO()
    _Pickler(buffer).dump(result)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays, which takes a thirtieth of the time."""

    def reducer_override(self, value: object) -> Any:
        if type(value) is not torch.Tensor or value.dtype == torch.bfloat16 or value.requires_grad:
            return NotImplemented
        return torch.from_numpy, (value.numpy(),)
