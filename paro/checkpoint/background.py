"""Async save: a copy of the states in page-locked host memory, and the thread that writes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from paro.checkpoint.chunks import ChunkedState, chunks_of
from paro.errors import RunError
from paro.layout import Shape
from paro.text import size_text

_ALIGN = 64  # bytes; values of any dtype begin at multiples of the alignment


class HostCopy:
    """Host buffers for the chunks this rank writes; allocated by the first save, then reused."""

    def __init__(self) -> None:
        self._room: dict[tuple[str, Shape], Tensor] = {}

    def take(self, states: dict[str, ChunkedState]) -> dict[str, ChunkedState]:
        """Copy the states into the buffers, overwriting the previous copy; return the copy."""
        sources = chunks_of(states)
        missing = {key: values for key, values in sources.items() if key not in self._room}
        block = torch.empty(starts_of(missing.values())[-1], dtype=torch.uint8)
        self._room |= zip(missing, cut_up(block, [*missing.values()]), strict=True)
        for key, values in sources.items():
            self._room[key].copy_(values, non_blocking=values.is_cuda)
        # The next step may overwrite the shards as soon as this returns.
        if any(values.is_cuda for values in sources.values()):
            torch.cuda.current_stream().synchronize()
        return {
            name: replace(
                state, chunks={offsets: self._room[name, offsets] for offsets in state.chunks}
            )
            for name, state in states.items()
        }


def starts_of(sources: Iterable[Tensor], align: int = _ALIGN) -> list[int]:
    """Return the offset in bytes of each source's copy in a block; the last item is the size."""
    return [0, *accumulate(-(-values.nbytes // align) * align for values in sources)]


def cut_up(block: Tensor, sources: Sequence[Tensor], align: int = _ALIGN) -> list[Tensor]:
    """Cut a block into tensors for copies of the sources; page-lock it for sources on a GPU."""
    on_gpu = next((values.device for values in sources if values.is_cuda), None)
    if on_gpu is not None and block.nbytes:
        pin(block, on_gpu)
    return [
        block[start : start + values.nbytes].view(values.dtype).view(values.shape)
        for start, values in zip(starts_of(sources, align), sources, strict=False)
    ]


class Background:
    """A thread that runs one job at a time and keeps its exception until `wait` is called.

    The thread is a daemon: a rank that exits after an error must not join a thread that waits for
    a dead peer.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def start(self, job: Callable[[], None]) -> None:
        assert self._thread is None, "the job before was not waited for"
        self._thread = threading.Thread(target=self.run, args=(job,), name="save", daemon=True)
        self._thread.start()

    def wait(self) -> Exception | None:
        """Wait for the last job; return its exception or None. Later calls return None."""
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
        """True if the last job has failed; False while it still runs."""
        return self._failure is not None

    def run(self, job: Callable[[], None]) -> None:
        """Run a job in the calling thread, and keep its exception until `wait` is called."""
        try:
            with torch.no_grad():
                job()
        except Exception as error:
            self._failure = error


def pin(room: Tensor, device: torch.device) -> None:
    """Page-lock the memory of `room` for a GPU until the process ends.

    torch's own pinned tensors would take up to twice the memory: sizes are rounded up to a power of
    two. Ranges that are locked separately must not share a page: lock one block, and cut it.
    """
    with torch.cuda.device(device):  # else a new thread makes a context on GPU 0
        status = int(torch.cuda.cudart().cudaHostRegister(room.data_ptr(), room.nbytes, 0))
    if status != 0:
        raise RunError(
            f"{size_text(room.nbytes)} of host memory cannot be page-locked for copies from "
            f"{device}: CUDA error {status}"
        )
