"""Stands for NCCL's groups, torch's memory pools, and a GPU's streams, where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from threading import local
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.cuda._sanitizer import (
    DEFAULT_STREAM_ID,
    FACTORY_FUNCTION_REGEX,
    ArgumentHandler,
    EventHandler,
)
from torch.multiprocessing.reductions import StorageWeakRef


class Options:
    """Stands for torch's, which only builds with NCCL have."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)
        self.config = SimpleNamespace(max_ctas=None, cta_policy=None)


def lacking(setting: str) -> type[Options]:
    """Options of a torch that does not have a setting of NCCL."""

    class Lacking(Options):
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            super().__init__(is_high_priority_stream)
            delattr(self.config, setting)

    return Lacking


@dataclass(eq=False)
class Pool:
    """Stands for a pool of torch's allocator: segments by address, and those that are in use."""

    allocator: str
    segments: dict[int, int] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)


class FakeNccl:
    """Notes the calls of groups, and what pools get, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **kind: Any) -> None:
        self.notes: list[tuple[Any, ...]] = []
        self.calls: list[dict[str, Any]] = []  # of new_group
        self.multiprocessors = 132
        self.room = 1 << 40  # bytes that segments may take
        self._pool: Pool | None = None
        self._used: dict[int, tuple[Pool, int]] = {}  # by storage: its segment
        kind = {"Options": Options, "NCCL_CTA_POLICY_ZERO": 2, **kind}
        monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(**kind), raising=False)
        monkeypatch.setattr(dist, "new_group", self.new_group)
        monkeypatch.setattr(
            dist, "destroy_process_group", lambda group: self.notes.append(("destroy", group.ranks))
        )
        monkeypatch.setattr(torch.cuda, "MemPool", Pool)
        monkeypatch.setattr(torch.cuda, "use_mem_pool", self.use_mem_pool)
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda _device: SimpleNamespace(multi_processor_count=self.multiprocessors),
        )
        self._give_memory(monkeypatch)

    def _give_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Storages have places in pools, in addition to memory of their own."""
        resize, address = torch.UntypedStorage.resize_, torch.UntypedStorage.data_ptr

        def noted_resize(storage: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
            if not num_bytes and storage._cdata in self._used:
                pool, segment = self._used.pop(storage._cdata)
                pool.used.remove(segment)
            elif num_bytes and self._pool is not None:
                self._used[storage._cdata] = self._pool, self._segment(self._pool, num_bytes)
            return resize(storage, num_bytes)

        def place(storage: torch.UntypedStorage) -> int:
            _, segment = self._used.get(storage._cdata, (None, 0))
            return segment or address(storage)

        monkeypatch.setattr(torch.UntypedStorage, "resize_", noted_resize)
        monkeypatch.setattr(torch.UntypedStorage, "data_ptr", place)

    def _segment(self, pool: Pool, num_bytes: int) -> int:
        free = [
            at for at, size in pool.segments.items() if at not in pool.used and num_bytes <= size
        ]
        if not free:
            self.room -= num_bytes
            if self.room < 0:
                raise torch.OutOfMemoryError("CUDA out of memory")
            free = [1 + len(self.notes)]
            pool.segments[free[0]] = num_bytes
            self.notes.append(("segment", pool, num_bytes))
        pool.used.add(free[0])
        return free[0]

    @property
    def policies(self) -> dict[tuple[int, ...], int | None]:
        return {tuple(c["ranks"]): c["pg_options"].config.cta_policy for c in self.calls}

    def new_group(self, ranks: list[int], **named: Any) -> object:
        self.calls.append({"ranks": ranks, **named})
        backend = SimpleNamespace(
            mem_allocator="of NCCL",
            register_mem_pool=lambda pool, symm: self.notes.append(("register", ranks, pool, symm)),
            deregister_mem_pool=lambda pool: self.notes.append(("deregister", ranks, pool)),
        )
        return SimpleNamespace(ranks=ranks, _get_backend=lambda _device: backend)

    @contextmanager
    def use_mem_pool(self, pool: Pool) -> Iterator[None]:
        """While entered, storages get their memory from the pool; not entered twice at once."""
        assert self._pool is None, "a pool is in use"
        self._pool = pool
        try:
            yield
        finally:
            self._pool = None


# torch's CUDA Sanitizer finds the races, of what is noted here instead of by CUDA: a tensor that is
# used on one stream, was written on another, and no wait in between (or written after it was read).
# It knows a tensor by its beginning: views of a buffer that begin elsewhere are not compared.

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
