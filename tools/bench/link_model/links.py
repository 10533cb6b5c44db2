"""Time of a rank's collectives on links that carry one at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from paro.collectives.schedule import Op
from paro.machine.collective_time import CollectiveTimes, TimedJob
from paro.machine.machine import Machine
from paro.topology import Axis, Link

_SLICE_SECONDS = 0.01  # a waiting thread sleeps for as long
_FROM, _TO = torch.zeros(1 << 16), torch.empty(1 << 16)  # copied to take processor time


@dataclass(slots=True, eq=False)
class Links:
    """The links of one rank of a machine. If they are free, transfers take no time."""

    machine: Machine
    are_free: bool = False
    # Processor time of a rank's own code in a collective, by op, which the machine file counts too.
    host_seconds: Mapping[Op, float] = field(default_factory=dict)
    _idle_at: dict[Link, float] = field(default_factory=lambda: dict.fromkeys(Link, 0.0))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _times: CollectiveTimes = field(init=False)

    def __post_init__(self) -> None:
        self._times = CollectiveTimes(self.machine, "native")

    def job(self, op: Op | None, ranks: tuple[int, ...], num_bytes: int) -> TimedJob | None:
        """Model a collective of evenly spaced ranks on `num_bytes`; None: no time.

        Without `op` it is a message from each of them to the next: a part of a reduce-scatter,
        which ranks on CPUs make of messages.
        """
        if self.are_free or len(ranks) == 1 or num_bytes == 0:
            return None
        stride, size = ranks[1] - ranks[0], len(ranks)
        assert ranks == tuple(range(ranks[0], ranks[-1] + 1, stride)), f"{ranks} are not even"
        axis = Axis(index=0, inner=stride, outer=stride * size, link=Link.INTRA)
        whole = num_bytes if op else num_bytes * size
        ((job,),) = self._times.phases(op or Op.REDUCE_SCATTER, (axis,), whole)
        return job if op else job._replace(seconds=job.seconds / (size - 1))

    def spent_on(self, op: Op | None, ranks: int) -> float:
        """Return the processor time of a rank's own code in a collective, or in a message."""
        if op is None:
            return self.host_seconds.get(Op.REDUCE_SCATTER, 0.0) / (ranks - 1)
        return self.host_seconds.get(op, 0.0)

    def book(self, job: TimedJob) -> float:
        """Return the end of a transfer on the clock of `time.perf_counter`: earlier ones go first.

        Ranks share processors here as where the machine was measured, so the part of the time for
        which the transfer worked on them is spent by `stay`.
        """
        link, busy = link_of(job)
        with self._lock:
            begin = max(time.perf_counter(), self._idle_at[link])
            self._idle_at[link] = begin + job.seconds * busy
        return begin + job.seconds * (1.0 - job.cpu)

    def stay(self, job: TimedJob, end: float, spent: float) -> None:
        """Block the thread until a transfer's end, and until it has used its processor time.

        It has `spent` seconds of that.
        """
        cores = self.machine.device.cores if self.machine.device else None
        owed, used = job.seconds * job.cpu * (cores or 0.0), time.thread_time() - spent
        while (left := end - time.perf_counter()) > 0.0 or time.thread_time() - used < owed:
            due = owed * min(1.0, 1.0 - left / job.seconds)
            if time.thread_time() - used < due:
                _TO.copy_(_FROM)  # without Python's lock, as a socket works
            else:
                time.sleep(max(0.0, min(left, _SLICE_SECONDS)))


def link_of(job: TimedJob) -> tuple[Link, float]:
    """Return the kind of links that a transfer takes, and for which share of its time."""
    return (Link.INTER, job.inter) if job.inter else (Link.INTRA, job.intra)
