"""Processes that have torch and the project imported, forked from one that all tests share."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import forkserver, reduction, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

# The entry script, pytest and all their imports, and what a run imports when it recomputes, saves,
# also in a store, or prints; otherwise seconds in every rank.
PRELOADED = (
    *("pytest", "pretrain_llama", "tests.helpers.scripts", "tests.helpers.training"),
    *("torch.distributed.fsdp", "torch._dynamo", "torch.distributed.checkpoint"),
    # Of s3fs what is not anyio, whose plugin pytest would find imported too early.
    *("numpy.random", "rich.console", "aiohttp", "botocore.session"),
)

# Seconds after which a process counts as hanging: beside other tests some take ten times as long as
# alone.
HANGS_AFTER = 600.0


def warm_process(target: Callable[..., object], *args: object, name: str) -> BaseProcess:
    """Returns a process that has imported the common modules, forked from a server that has.

    What it starts in turn, such as processes that read data, is forked from it, as of a command,
    or by this function from the one server, also where it is a worker of pytest-xdist. It is not a
    daemon: it may start others.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    server = forkserver._forkserver
    server.ensure_running()
    address = server._forkserver_address  # type: ignore[attr-defined]
    words = (_Output(), address, target, *args)
    return context.Process(target=_as_a_command, args=words, name=name)


class _Output:
    """The standard output and error of the process that starts another; pickled, for that one."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _take, (reduction.DupFd(1), reduction.DupFd(2))


def _take(output: Any, error: Any) -> None:
    for own, stream in ((1, output), (2, error)):
        descriptor = stream.detach()
        os.dup2(descriptor, own)
        os.close(descriptor)


def _as_a_command(
    _output: None, address: str, target: Callable[..., object], *args: object
) -> None:
    # Else from servers of its own, which would import torch again.
    server = forkserver._forkserver
    server._forkserver_address = address  # type: ignore[attr-defined]
    server.ensure_running = resource_tracker.ensure_running  # type: ignore[method-assign]
    multiprocessing.set_start_method("fork", force=True)
    target(*args)
