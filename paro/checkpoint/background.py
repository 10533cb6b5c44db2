"""Saving while training goes on: a copy in host memory, and a thread that writes it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from paro.checkpoint.boxes import BoxedState
from paro.layout import Shape


class HostCopy:
    """Room on the host for what this rank writes; taken once, filled anew by every save."""

    def __init__(self) -> None:
        self._room: dict[tuple[str, Shape], Tensor] = {}

    def take(self, states: dict[str, BoxedState]) -> dict[str, BoxedState]:
        """The same states with values that training does not touch; those before are gone."""
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
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copied

    @property
    def num_bytes(self) -> int:
        return sum(room.nbytes for room in self._room.values())


class Background:
    """One job at a time on a thread of its own; its failure is kept until it is asked for.

    The thread is a daemon: a rank that leaves after a fault does not join one that waits for a
    dead peer.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def start(self, job: Callable[[], None]) -> None:
        assert self._thread is None, "the job before was not waited for"
        self._thread = threading.Thread(target=self._run, args=(job,), name="save", daemon=True)
        self._thread.start()

    def wait(self) -> Exception | None:
        """What the last job failed of; told once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        return failure

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether a job has failed already; says nothing of one that still runs."""
        return self._failure is not None

    def _run(self, job: Callable[[], None]) -> None:
        try:
            with torch.no_grad():
                job()
        except Exception as error:
            self._failure = error
