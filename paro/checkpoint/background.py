"""Async save: a copy of the states in host memory, and the thread that writes it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from paro.checkpoint.boxes import BoxedState
from paro.layout import Shape


class HostCopy:
    """Host buffers for what this rank writes; allocated by the first save, reused by later ones."""

    def __init__(self) -> None:
        self._room: dict[tuple[str, Shape], Tensor] = {}

    def take(self, states: dict[str, BoxedState]) -> dict[str, BoxedState]:
        """A copy of the states that training does not change; overwrites the previous copy."""
        copied: dict[str, BoxedState] = {}
        on_gpu = False
        for name, state in states.items():
            rectangles = {}
            for corner, values in state.rectangles.items():
                room = self._room.get((name, corner))
                if room is None:
                    room = torch.empty_like(values, device="cpu", pin_memory=values.is_cuda)
                    self._room[name, corner] = room
                room.copy_(values, non_blocking=values.is_cuda)
                on_gpu |= values.is_cuda
                rectangles[corner] = room
            copied[name] = replace(state, rectangles=rectangles)
        # The next step may overwrite the shards as soon as this returns.
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copied

    @property
    def num_bytes(self) -> int:
        return sum(room.nbytes for room in self._room.values())


class Background:
    """Runs one job at a time on its own thread; keeps its exception until `wait` is called.

    The thread is a daemon: a rank that exits after an error must not join a thread that waits for
    a dead peer.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def start(self, job: Callable[[], None]) -> None:
        assert self._thread is None, "the job before was not waited for"
        self._thread = threading.Thread(target=self._run, args=(job,), name="save", daemon=True)
        self._thread.start()

    def wait(self) -> Exception | None:
        """Waits for the last job; its exception or None. Later calls return None."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        return failure

    @property
    def is_started(self) -> bool:
        """Whether there is a job that was not waited for; it may have ended."""
        return self._thread is not None

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether the last job has failed; False while it still runs."""
        return self._failure is not None

    def _run(self, job: Callable[[], None]) -> None:
        try:
            with torch.no_grad():
                job()
        except Exception as error:
            self._failure = error
