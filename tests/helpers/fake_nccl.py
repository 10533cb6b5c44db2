"""Stands for NCCL's groups, and for torch's memory pools, on machines that have neither."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist


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
