"""Exposed communication time: how long compute waited, by kind of communication and of link."""

# [Note: what is exposed]
# Comm streams overlap with the training thread, so communication time and exposed time differ. This
# module measures exposed time: how long the training thread waited for a job or, without overlap,
# ran the job itself, plus the time to queue the job. A job may depend on earlier jobs (a gather
# between groups, then a gather inside): the training thread waits for them one by one, so that the
# time is counted for the links that were busy.
#
# With CUDA streams compute waits on the device, not on the host: a pair of events around the wait
# measures the time. Which links were busy is not measured then.

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from paro.distributed.comm_stream import DONE, Event, link_of_stream
from paro.distributed.timers import profile_range
from paro.topology import Link, WaitKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ExposedTime:
    """Seconds that compute waited, by kind and by link; None: not measured (with CUDA streams)."""

    gather: float = 0.0
    reduce: float = 0.0
    publish: float = 0.0
    context: float = 0.0
    intra: float | None = None
    inter: float | None = None

    @property
    def total(self) -> float:
        return sum(getattr(self, kind.value) for kind in WaitKind)


class ExposedTimer:
    """Counter of the exposed time of all units, which the training loop reads once per step.

    `on_streams`: time is measured on the device, not on the host, and not by kind of link.
    """

    def __init__(self, *, on_streams: bool = False) -> None:
        self._on_streams = on_streams
        self._by_kind = dict.fromkeys(WaitKind, 0.0)
        self._by_link = dict.fromkeys(Link, 0.0)
        self._pending: list[tuple[WaitKind, torch.cuda.Event, torch.cuda.Event]] = []

    def wait(self, kind: WaitKind, event: Event) -> None:
        """Wait for `event` on the training thread."""
        if event is DONE:
            return
        with self.submitting(kind):
            if not self._on_streams:
                for stream, stage in event.stages():
                    begin = time.perf_counter()
                    stage.wait()
                    self.note(stream, time.perf_counter() - begin)
            event.wait()

    @contextmanager
    def submitting(self, kind: WaitKind) -> Iterator[None]:
        """Measure a block that queues communication or, without overlap, runs it.

        The block is the range `paro/wait:<kind>` in a profile.
        """
        with profile_range(f"wait:{kind.value}"):
            if self._on_streams:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                yield
                end.record()
                self._pending.append((kind, start, end))
                return
            begin = time.perf_counter()
            yield
            self._by_kind[kind] += time.perf_counter() - begin

    def note(self, stream: Hashable, seconds: float) -> None:
        """Add to the kind of links of comm stream `(kind, axis, ...)`; to inter if it has both.

        Streams of another name communicate with no rank.
        """
        if not self._on_streams and isinstance(stream, tuple):
            self._by_link[link_of_stream(stream)] += seconds

    def take(self) -> ExposedTime:
        """Return the exposed time since the last call; pending CUDA events count next time."""
        unfinished = []
        for kind, start, end in self._pending:
            if end.query():
                self._by_kind[kind] += start.elapsed_time(end) / 1000.0
            else:
                unfinished.append((kind, start, end))
        self._pending = unfinished
        by_kind, by_link = self._by_kind, self._by_link
        self._by_kind, self._by_link = dict.fromkeys(WaitKind, 0.0), dict.fromkeys(Link, 0.0)
        links = {} if self._on_streams else {link.value: by_link[link] for link in Link}
        return ExposedTime(**{kind.value: seconds for kind, seconds in by_kind.items()}, **links)
