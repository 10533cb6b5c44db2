"""Communication streams, which overlap communication with compute: threads or CUDA streams."""

# [Note: stream order]
# A comm stream is a queue of jobs. All collectives of one process group run on one comm stream
# (point-to-point messages, which are matched by tag, may be sent from other threads). The training
# thread submits all jobs, in program order, and a job waits only for jobs submitted before it. All
# ranks run the same program, so the earliest unfinished job can run on all of them: there is no
# deadlock, and the collectives of a group have the same order on all ranks.
#
# On CPU a comm stream is a daemon thread: it runs a job once the jobs that it depends on are done.
# On CUDA it is a CUDA stream: a job's kernels are enqueued immediately, after the events that the
# job depends on and after all work that the training thread has enqueued on its own stream. So the
# training thread may allocate a buffer, pass it to a job, wait for the job, and free the buffer.

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from paro.distributed.timers import profile_range
from paro.topology import Link

Job = Callable[[], object]


class Event(Protocol):
    """The completion of a job."""

    def wait(self) -> None:
        """Make the training thread (on CUDA: its stream) wait; raise if a job has failed."""

    def stages(self) -> Iterator[Stage]:
        """Yield the unfinished jobs that the event waits for with their streams, if known."""
        return iter(())


Stage = tuple[Hashable, Event]


@dataclass(frozen=True, slots=True, eq=False)
class AllEvents:
    """The completion of several jobs."""

    events: Sequence[Event]

    def wait(self) -> None:
        for event in self.events:
            event.wait()

    def stages(self) -> Iterator[Stage]:
        for event in self.events:
            yield from event.stages()


DONE = AllEvents(())  # the completed event: nothing to wait for


class CommStreams(Protocol):
    """The comm streams of a rank, by key; each is created by its first job.

    `runs_concurrently`: every comm stream is a thread, so jobs on different comm streams may wait
    for each other. Otherwise a job may wait only for jobs submitted earlier.
    """

    runs_concurrently: bool = False

    def submit(self, stream: Hashable, job: Job, *, after: Event = DONE) -> Event:
        """Queue `job` after the earlier jobs of `stream` and after the event `after`."""

    def close(self) -> None:
        """Close the comm streams after their jobs have run."""
        return


def link_of_stream(stream: Hashable) -> Link:
    """Return the kind of links of comm stream `(kind, axis, ...)`; inter if it has both kinds."""
    assert isinstance(stream, tuple), f"a comm stream {stream!r} without axes"
    return Link.INTER if any(axis.link is Link.INTER for axis in stream[1:]) else Link.INTRA


def stream_name(stream: Hashable) -> str:
    """Return the name of a comm stream in profiles and stack dumps, such as "gather 0 intra"."""
    if not isinstance(stream, tuple):
        return str(stream)
    kind, *axes = stream
    numbers = "+".join(str(axis.index) for axis in axes)
    return f"{kind.value} {numbers} {link_of_stream(stream).value}"


@dataclass(slots=True, eq=False)
class InlineStreams(CommStreams):
    """Comm streams without overlap: jobs run at once on the training thread, timed by `note`."""

    note: Callable[[Hashable, float], None] | None = None

    def submit(self, stream: Hashable, job: Job, *, after: Event = DONE) -> Event:
        begin = time.perf_counter()
        with torch.no_grad(), profile_range(f"lane:{stream_name(stream)}"):
            job()
        if self.note is not None:
            self.note(stream, time.perf_counter() - begin)
        return DONE


_GLANCE_SECONDS = 0.5  # interval at which a waiting thread checks for failures elsewhere


@dataclass(slots=True, eq=False)
class _ThreadEvent:
    stream: Hashable
    after: Event
    failures: list[BaseException]
    finished: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        # A job may never finish: it may wait for a job that was skipped on another comm stream.
        while not self.finished.wait(_GLANCE_SECONDS) and not self.failures:
            pass
        if self.failures:
            raise RuntimeError("a collective failed on this rank") from self.failures[0]

    def stages(self) -> Iterator[Stage]:
        if not self.finished.is_set():
            yield from self.after.stages()
            yield self.stream, self


_Task = tuple[Job, _ThreadEvent]


class ThreadStreams(CommStreams):
    """Comm streams that are daemon threads; every wait after the first failure raises the failure.

    After a failure the remaining jobs are skipped, so that the training thread never waits for a
    dead peer. A thread that hangs in a collective does not block the exit: threads are daemons.
    """

    runs_concurrently = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._queues: dict[Hashable, queue.SimpleQueue[_Task | None]] = {}
        self._threads: list[threading.Thread] = []
        self._failures: list[BaseException] = []

    def submit(self, stream: Hashable, job: Job, *, after: Event = DONE) -> Event:
        if stream not in self._queues:
            self._queues[stream] = queue.SimpleQueue()
            name = f"comm stream {stream_name(stream)}"
            thread = threading.Thread(target=self._work, args=(stream,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        event = _ThreadEvent(stream, after, self._failures)
        self._queues[stream].put((job, event))
        return event

    def close(self) -> None:
        for stream in self._queues.values():
            stream.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self, stream: Hashable) -> None:
        torch.set_grad_enabled(False)  # thread-local, as is the device
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while (task := self._queues[stream].get()) is not None:
            job, event = task
            try:
                event.after.wait()
                if not self._failures:
                    with profile_range(f"lane:{stream_name(stream)}"):
                        job()
            except BaseException as failure:
                if not self._failures:  # otherwise this is the first failure raised by `wait`
                    self._failures.append(failure)
            finally:
                event.after = DONE  # otherwise every event would keep all earlier ones alive
                event.finished.set()


@dataclass(frozen=True, slots=True, eq=False)
class _StreamEvent(Event):  # without stages: the times of single jobs are not measured
    event: torch.cuda.Event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


# A collective's few blocks run before waiting blocks of kernels that compute.
_PRIORITY = -1


class CudaStreams(CommStreams):
    """Comm streams that are CUDA streams; errors are raised where CUDA reports them."""

    def __init__(self) -> None:
        self._streams: dict[Hashable, torch.cuda.Stream] = {}

    def submit(self, stream: Hashable, job: Job, *, after: Event = DONE) -> Event:
        if stream not in self._streams:
            self._streams[stream] = torch.cuda.Stream(priority=_PRIORITY)
        cuda_stream = self._streams[stream]
        cuda_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(cuda_stream), torch.no_grad():
            after.wait()
            with profile_range(f"lane:{stream_name(stream)}"):
                job()
            return _StreamEvent(cuda_stream.record_event())

    def close(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()
