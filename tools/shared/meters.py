"""Meters that a rank reads on its machine: network interface bytes, memory, processor time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
import torch

from paro.errors import UserError
from paro.report.memory import anonymous_bytes, give_back_freed_memory

_SAMPLE_SECONDS = 0.005
_PAGES = Path("/proc/self/statm")


def watched_interfaces(names: str | None) -> tuple[str, ...]:
    """Return the interfaces that GLOO_SOCKET_IFNAME names, without the loopback."""
    return tuple(name for name in (names or "").split(",") if name and name != "lo")


def sent_bytes(interfaces: tuple[str, ...]) -> dict[str, int]:
    """Return bytes sent by each interface of this network namespace."""
    nics = psutil.net_io_counters(pernic=True, nowrap=False)
    missing = [name for name in interfaces if name not in nics]
    if missing:
        raise UserError(
            f"GLOO_SOCKET_IFNAME names {', '.join(missing)}, but this node has {', '.join(nics)}"
        )
    return {name: nics[name].bytes_sent for name in interfaces}


def add_up_sent(ranks: list[tuple[str, dict[str, int]]]) -> int | None:
    """Return bytes sent by a cluster: each node's interfaces once, however many ranks watch them.

    Each rank gives its node and what its interfaces sent; None where none is watched.
    """
    by_interface: dict[tuple[str, str], int] = {}
    for node, sent in ranks:
        for interface, count in sent.items():
            key = node, interface
            by_interface[key] = max(by_interface.get(key, 0), count)
    return sum(by_interface.values()) if by_interface else None


def drop_from_cache(files: Iterable[Path]) -> None:
    """Drop the files' pages from the page cache, so that the next read is from the disk."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class MemoryMeter:
    """Peak memory of a contender above the bytes that the process held before it.

    On CUDA: the peak bytes that the caching allocator handed out, from the start of the first
    warm-up step. On a CPU: anonymous resident pages (without libraries, which are read from files),
    sampled every 5 ms in the warm-up steps, so that timed steps are not disturbed. None where the
    system does not report it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peak = 0
        self._most_in_use = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        give_back_freed_memory()
        self._before = self._now()
        self._in_use_before = bytes_in_use() or 0

    def start(self) -> None:
        """Call when the contender is built and has not trained."""
        give_back_freed_memory()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif _PAGES.exists():
            self._thread.start()

    def again(self) -> MemoryMeter:
        """Return a new meter with this baseline, for another contender."""
        other = MemoryMeter(self._device)
        other._before, other._in_use_before = self._before, self._in_use_before
        return other

    def end_of_warmup(self) -> None:
        if self._thread.is_alive():
            self._stop.set()
            self._thread.join()

    def peak(self) -> int | None:
        """Return the peak in bytes; call after the last step."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._before
        return self._peak - self._before if self._peak else None

    def peak_in_use(self) -> int | None:
        """Return the peak without freed memory that the allocator keeps; after warm-up.

        On CUDA it is the peak itself; None where the C library does not report it.
        """
        if self._device.type == "cuda":
            return self.peak()
        return self._most_in_use - self._in_use_before if self._most_in_use else None

    def _now(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return anonymous_bytes() if _PAGES.exists() else 0

    def _sample(self) -> None:
        while not self._stop.is_set():
            self._peak = max(self._peak, self._now())
            self._most_in_use = max(self._most_in_use, bytes_in_use() or 0)
            time.sleep(_SAMPLE_SECONDS)


def bytes_in_use() -> int | None:
    """Return bytes got from malloc and not freed; None where no C library counts."""
    if not hasattr(psutil, "heap_info"):
        return None
    heap = psutil.heap_info()
    return int(heap.heap_used + heap.mmap_used)
