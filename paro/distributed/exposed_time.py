"""How long computation stood still for communication, by what it waited for and by links."""

# [Note: what is exposed]
# Lanes work beside the training thread, so the time that communication takes and the time that it
# costs differ. Measured is the cost: how long the training thread waited for the end of a job, or
# carried it out itself where nothing overlaps, and what queueing it took. A job's end depends on
# earlier ones (a gather between groups, then one inside): each is waited for in turn, so the time
# goes to the links that were busy meanwhile.
#
# On CUDA streams the host waits for nothing and computation stands still on the device: a pair of
# events around the wait says for how long. Which links were busy then is not measured there.

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import torch

from paro.distributed.comm_stream import DONE, Event
from paro.topology import Link, Topology


class WaitKind(Enum):
    """What the training thread waits for."""

    GATHER = "gather"  # parameters, before a unit runs
    REDUCE = "reduce"  # gradients, before the update and where their buffers are needed again
    GATHER_UPDATED = "publish"  # updated parameters, before they are read


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposed:
    """Seconds for which computation stood still; by link None where that is not measured."""

    gather: float = 0.0
    reduce: float = 0.0
    gather_updated: float = 0.0
    intra: float | None = None
    inter: float | None = None

    @property
    def total(self) -> float:
        return self.gather + self.reduce + self.gather_updated


class Exposure:
    """A stopwatch that the units run and the training loop reads once a step.

    `topology` tells lanes' links apart; without one they are not. `on_streams` measures on the
    device instead of the host.
    """

    def __init__(self, topology: Topology | None = None, *, on_streams: bool = False) -> None:
        self._topology = topology
        self._on_streams = on_streams
        self._by_kind = dict.fromkeys(WaitKind, 0.0)
        self._by_link = dict.fromkeys(Link, 0.0)
        self._pending: list[tuple[WaitKind, torch.cuda.Event, torch.cuda.Event]] = []

    def wait(self, kind: WaitKind, event: Event) -> None:
        """Waits for `event` on the training thread."""
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
        """Measures a block that queues communication, or does it where nothing overlaps.

        In a profile it is `paro/wait:<kind>`.
        """
        with torch.profiler.record_function(f"paro/wait:{kind.value}"):
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
        """Adds to the links of a lane: `(use, axis index, ...)`, slow ones where it has both."""
        if self._topology is None or self._on_streams:
            return
        self._by_link[_link(self._topology, _axes(stream))] += seconds

    def name(self, stream: Hashable) -> str:
        """What a lane does, over which axes and links: "gather 0 intra"."""
        if self._topology is None:
            return str(stream)
        axes = _axes(stream)
        numbers = "+".join(map(str, axes))
        return f"{stream[0].value} {numbers} {_link(self._topology, axes).value}"  # type: ignore[index]

    def take(self) -> Exposed:
        """What was exposed since the last call."""
        unfinished = []
        for kind, start, end in self._pending:
            if end.query():
                self._by_kind[kind] += start.elapsed_time(end) / 1000.0
            else:
                unfinished.append((kind, start, end))
        self._pending = unfinished
        by_kind, by_link = self._by_kind, self._by_link
        self._by_kind, self._by_link = dict.fromkeys(WaitKind, 0.0), dict.fromkeys(Link, 0.0)
        knows_links = self._topology is not None and not self._on_streams
        return Exposed(
            gather=by_kind[WaitKind.GATHER],
            reduce=by_kind[WaitKind.REDUCE],
            gather_updated=by_kind[WaitKind.GATHER_UPDATED],
            intra=by_link[Link.INTRA] if knows_links else None,
            inter=by_link[Link.INTER] if knows_links else None,
        )


def _axes(stream: Hashable) -> tuple[int, ...]:
    assert isinstance(stream, tuple), f"a lane {stream!r} without axes"
    return stream[1:]


def _link(topology: Topology, axes: tuple[int, ...]) -> Link:
    links = {topology.axes[index].link for index in axes}
    return Link.INTER if Link.INTER in links else Link.INTRA
