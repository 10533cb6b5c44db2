"""Streams and events of a GPU without values: who waits for whom, and the races that are left."""

# torch's CUDA Sanitizer finds the races, of what is noted here instead of by CUDA: a tensor that is
# used on one stream, was written on another, and no wait in between (or written after it was read).
# It knows a tensor by its beginning: views of a buffer that begin elsewhere are not compared.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from threading import local
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.cuda._sanitizer import (
    DEFAULT_STREAM_ID,
    FACTORY_FUNCTION_REGEX,
    ArgumentHandler,
    EventHandler,
)
from torch.multiprocessing.reductions import StorageWeakRef

_storages: dict[int, tuple[int, StorageWeakRef]] = {}


def address(tensor: FakeTensor) -> int:
    """The number of a tensor's first byte; no two storages share one, freed ones included."""
    storage = tensor.untyped_storage()
    if storage._cdata not in _storages:  # a weak reference keeps the number from being used again
        _storages[storage._cdata] = len(_storages) + 1, StorageWeakRef(storage)
    number, _ = _storages[storage._cdata]
    return (number << 44) + int(tensor.storage_offset()) * tensor.itemsize


class Order:
    """The order of all work on the streams of a GPU; `host_waits` is called by what waits there."""

    def __init__(self, host_waits: Callable[[str], None]) -> None:
        self.host_waits = host_waits
        self.handler = EventHandler()
        self._numbers = count(DEFAULT_STREAM_ID + 1)  # of streams and events
        self._here = local()  # its stream is the current one of a thread

    @property
    def stream(self) -> int:
        """The number of this thread's current stream."""
        return int(getattr(self._here, "stream", DEFAULT_STREAM_ID))

    @contextmanager
    def on_stream(self, stream: Stream | None) -> Iterator[None]:
        before = self.stream
        self._here.stream = before if stream is None else stream.number
        yield
        self._here.stream = before

    def functions(self) -> dict[str, Any]:
        """The functions of torch.cuda that take or return streams and events, by name."""
        return {
            "Stream": lambda *_, **__: Stream(self, next(self._numbers)),
            "Event": lambda *_, **__: Event(self, next(self._numbers)),
            "current_stream": lambda _device=None: Stream(self, self.stream),
            "stream": self.on_stream,
            "synchronize": lambda _device=None: self.host_waits("synchronize"),
        }

    def record_event(self, stream: int) -> Event:
        event = Event(self, next(self._numbers))
        event.record(stream)
        return event

    def host_waited(self) -> None:
        """Order all later work, of any stream, behind this stream's work."""
        self.handler._handle_stream_synchronization(self.stream)

    def races_of(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> list[str]:
        """With what an operation is in a race."""
        if func.namespace == "prim":  # asks for a tensor's device, and runs nothing there
            return []
        schema, seen = func._schema, ArgumentHandler()
        is_factory = bool(FACTORY_FUNCTION_REGEX.match(schema.name.partition("::")[2]))
        seen.parse_inputs(schema, args, kwargs, is_factory=is_factory)
        seen.parse_outputs(schema, out, is_factory=is_factory)
        return self._races(str(func), seen)

    def races_of_kernel(self, name: str, tensors: Sequence[Tensor], writes: int) -> list[str]:
        """With what a kernel is in a race that writes the first `writes` tensors, if no others."""
        seen = ArgumentHandler()
        for number, tensor in enumerate(tensors):
            seen._handle_argument(tensor, number < writes, metadata_only=False)
        return self._races(name, seen)

    def _races(self, name: str, seen: ArgumentHandler) -> list[str]:
        written = seen.dataptrs_written
        found: list[Any] = self.handler._handle_kernel_launch(
            self.stream,
            seen.dataptrs_read - written,
            written,
            seen.outputs,
            name,
            seen.tensor_aliases,
        )
        return [f"{name} after {error.previous_access.operator}" for error in found]


class Stream:
    """Stands for a CUDA stream, which its number tells from others."""

    def __init__(self, order: Order, number: int) -> None:
        self._order = order
        self.number = number
        self.device = torch.device("cuda", 0)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: Event) -> None:
        self._order.handler._handle_event_wait(event.number, self.number)

    def record_event(self) -> Event:
        return self._order.record_event(self.number)

    def synchronize(self) -> None:
        self._order.host_waits("synchronize")


class Event:
    """Stands for a CUDA event, which has always passed."""

    def __init__(self, order: Order, number: int) -> None:
        self._order = order
        self.number = number
        self._is_recorded = False

    def record(self, stream: int | None = None) -> None:
        number = self._order.stream if stream is None else stream
        self._order.handler._handle_event_record(self.number, number)
        self._is_recorded = True

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        assert self._is_recorded, "the beginning of what is timed"
        assert end._is_recorded, "the end of what is timed"
        return 1.0
