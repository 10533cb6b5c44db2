"""Queues that run communication beside the training thread: worker threads or CUDA streams."""

# [Note: stream order]
# A lane is one queue of jobs, and the collectives of a process group all run in one lane (messages
# from one rank to another, which are matched by tag, may be sent from other threads). Every job of
# every move is submitted by the training thread, in program order, and waits for jobs submitted
# earlier only. All ranks run the same program, so the earliest unfinished job is runnable on all
# of them: no deadlock, and no two collectives of one group in different orders.
#
# On CPU a lane is a daemon thread that runs a job when the jobs it waits for are done. On CUDA a
# lane is a stream: the job's kernels are enqueued at once, behind events, and behind all that the
# training thread had enqueued on its own stream by then. So a buffer may be taken by the training
# thread and given to a job, and may be dropped once the training thread has waited for that job.

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Protocol

import torch

Job = Callable[[], None]


class Event(Protocol):
    """The end of a job."""

    def wait(self) -> None:
        """Makes the training thread (on CUDA: its stream) wait; raises what the job raised."""

    def stages(self) -> Iterator[Stage]:
        """The unfinished jobs that this one waits for and itself, in order, with their lanes."""


Stage = tuple[Hashable, Event]


class CommStreams(Protocol):
    """Where jobs run; a lane exists from its first job on.

    `runs_concurrently`: jobs of different lanes may wait for each other, each in a thread of its
    own. Elsewhere a job must find all it waits for submitted before it.
    """

    runs_concurrently: bool

    def submit(self, stream: Hashable, job: Job, *, after: Event | None = None) -> Event:
        """Queues `job` behind the lane's earlier jobs and behind `after`."""

    def close(self) -> None:
        """Ends the lanes once their jobs have run."""


class DoneEvent:
    """A job that already ran."""

    def wait(self) -> None:
        return

    def stages(self) -> Iterator[Stage]:
        return iter(())


DONE = DoneEvent()


class AllEvents:
    """The end of several jobs."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events

    def wait(self) -> None:
        for event in self._events:
            event.wait()

    def stages(self) -> Iterator[Stage]:
        for event in self._events:
            yield from event.stages()


Name = Callable[[Hashable], str]  # what a lane is called, in profiles and in a hang's stacks


def _range(name: str) -> torch.profiler.record_function:
    """A job of a lane, in a profile."""
    return torch.profiler.record_function(f"paro/lane:{name}")


class InlineStreams:
    """No overlap: a job runs at once, on the training thread; `note` hears how long it took."""

    runs_concurrently = False

    def __init__(
        self, note: Callable[[Hashable, float], None] | None = None, *, name: Name = str
    ) -> None:
        self._note = note
        self._name = name

    def submit(self, stream: Hashable, job: Job, *, after: Event | None = None) -> Event:
        begin = time.perf_counter()
        with torch.no_grad(), _range(self._name(stream)):
            job()
        if self._note is not None:
            self._note(stream, time.perf_counter() - begin)
        return DONE

    def close(self) -> None:
        return


_GLANCE_SECONDS = 0.5  # how often one that waits looks whether another lane has failed


class _ThreadEvent:
    def __init__(
        self, stream: Hashable, after: Event | None, failures: list[BaseException]
    ) -> None:
        self.finished = threading.Event()
        self._stream = stream
        self._after = after
        self._failures = failures

    def wait(self) -> None:
        # A job may wait for one in another lane that was skipped after a failure: it never ends.
        while not self.finished.wait(_GLANCE_SECONDS) and not self._failures:
            pass
        if self._failures:
            raise RuntimeError("a collective failed on this rank") from self._failures[0]

    def stages(self) -> Iterator[Stage]:
        after = self._after
        if not self.finished.is_set():
            if after is not None:
                yield from after.stages()
            yield self._stream, self

    def finish(self) -> None:
        self._after = None  # else every event would keep all before it
        self.finished.set()


_Task = tuple[Job, Event | None, _ThreadEvent]


class ThreadStreams:
    """A daemon worker per lane. The first failure of any is raised at every later wait.

    After a failure the remaining jobs are skipped, so that the training thread never waits for a
    peer that is gone; a worker that still hangs in a collective is a daemon and holds nobody.
    """

    runs_concurrently = True

    def __init__(self, device: torch.device, *, name: Name = str) -> None:
        self._device = device
        self._name = name
        self._queues: dict[Hashable, queue.SimpleQueue[_Task | None]] = {}
        self._threads: list[threading.Thread] = []
        self._failures: list[BaseException] = []

    def submit(self, stream: Hashable, job: Job, *, after: Event | None = None) -> Event:
        if stream not in self._queues:
            self._queues[stream] = queue.SimpleQueue()
            name = f"lane {self._name(stream)}"
            thread = threading.Thread(target=self._work, args=(stream,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        event = _ThreadEvent(stream, after, self._failures)
        self._queues[stream].put((job, after, event))
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
        name = self._name(stream)
        while (task := self._queues[stream].get()) is not None:
            job, after, event = task
            try:
                if after is not None:
                    after.wait()
                if not self._failures:
                    with _range(name):
                        job()
            except BaseException as failure:
                if not self._failures:  # else it is the first one, met again while waiting
                    self._failures.append(failure)
            finally:
                event.finish()


class _StreamEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)

    def stages(self) -> Iterator[Stage]:
        return iter(())  # a stream cannot tell when it went from one to the next


class CudaStreams:
    """A CUDA stream per lane; errors surface where CUDA reports them."""

    runs_concurrently = False

    def __init__(self) -> None:
        self._streams: dict[Hashable, torch.cuda.Stream] = {}

    def submit(self, stream: Hashable, job: Job, *, after: Event | None = None) -> Event:
        if stream not in self._streams:
            self._streams[stream] = torch.cuda.Stream()
        stream = self._streams[stream]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            if after is not None:
                after.wait()
            job()
            return _StreamEvent(stream.record_event())

    def close(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()


def make_comm_streams(
    device: torch.device,
    *,
    overlap: bool,
    backend: str,
    note: Callable[[Hashable, float], None] | None = None,
    name: Name = str,
) -> CommStreams:
    """The lanes for a device; without overlap every job runs where it is submitted.

    `note` hears how long such a job took; `name` says what profiles call a lane.
    """
    if not overlap:
        return InlineStreams(note, name=name)
    if device.type == "cuda" and backend == "nccl":
        return CudaStreams()
    return ThreadStreams(device, name=name)
