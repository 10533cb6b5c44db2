"""Counter of the bytes that this rank sends, by kind of link."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from paro.topology import Link


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes sent over each kind of link."""

    intra: int = 0
    inter: int = 0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.intra + other.intra, self.inter + other.inter)

    def __mul__(self, times: int) -> Sent:
        return Sent(self.intra * times, self.inter * times)


class ByteCounter:
    """Counter of bytes sent, which the training loop reads once per iteration."""

    def __init__(self) -> None:
        self._bytes = dict.fromkeys(Link, 0)
        self._paused = False
        self._lock = threading.Lock()  # several comm stream threads call add

    def add(self, link: Link, num_bytes: int) -> None:
        with self._lock:
            if not self._paused:
                self._bytes[link] += num_bytes

    def take(self) -> Sent:
        """Return the bytes sent since the last call of `take`."""
        with self._lock:
            sent = Sent(self._bytes[Link.INTRA], self._bytes[Link.INTER])
            self._bytes = dict.fromkeys(Link, 0)
        return sent

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count no bytes inside the block: for evaluation and saving."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before
