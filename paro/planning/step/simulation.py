"""Discrete-event simulation of training threads, communication streams and shared links."""

# An actor stands for the ranks of a group, which all do the same: a training thread that runs a
# program, and communication streams. A program is a generator: it computes for a while, submits
# work to streams (at no cost) and waits for work. A stream runs work in the order of submission
# (distributed/comm_stream.py); work starts when all earlier work of its stream and all its
# dependencies are done. Work that joins groups starts when it is first in the stream of every group
# and ends for all at the same time. Where launches keep their order, a collective also starts only
# after all collectives that its actors have submitted before it have started, on any stream.
#
# Running jobs share links: each progresses at 1 / (sum of the shares of time for which they use the
# link), if that sum is more than 1. The thread loses the processor time that jobs use, and while a
# thread computes, jobs are slowed down by the measured factor.

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from paro.planning.machine.collective_time import StreamAxes, TimedJob

_LEAST_COMPUTE = 0.05  # of its speed: a computing thread always makes progress
_TINY = 1e-12  # seconds


class Activity(NamedTuple):
    """One activity of one stream of one actor, from `start` to `end` in seconds."""

    actor: int
    stream: str
    name: str
    kind: str
    start: float
    end: float


@dataclass(slots=True, eq=False)
class Work:
    """A job in a communication stream of one actor, or of all of them."""

    name: str
    kind: str
    job: TimedJob
    stream: tuple[str, StreamAxes]
    members: int  # the number of actors that take part
    after: Works
    left: float  # remaining seconds if it did not share links
    arrived: int = 0  # actors in whose stream it is first
    submitted: list[int] = field(default_factory=list)
    is_ordered: bool = False  # among its actors' launches
    running: bool = False
    done: bool = False
    start: float = 0.0
    rate: float = 1.0

    def blocker(self) -> Work:
        """The unfinished work at the start of the chain that this one waits for."""
        found = self
        while pending := next((work for work in found.after if not work.done), None):
            found = pending
        return found


Works = tuple[Work, ...]


class Compute(NamedTuple):
    """A program's request to compute."""

    seconds: float
    name: str
    kind: str


class Wait(NamedTuple):
    """A program's request to wait for work."""

    works: Works


Program = Generator[Compute | Wait, None, None]


@dataclass(slots=True, eq=False)
class Actor:
    """The state of one group's ranks."""

    index: int
    program: Program | None = None
    streams: dict[tuple[str, StreamAxes], deque[Work]] = field(default_factory=dict)
    computing: Compute | None = None
    left: float = 0.0
    start: float = 0.0
    waiting: Works = ()
    finished: float | None = None
    launches: deque[Work] = field(default_factory=deque)  # to start in this order
    exposed: dict[str, float] = field(default_factory=dict)
    computed: dict[str, float] = field(default_factory=dict)


class Simulation:
    """Runs the programs of some actors from time 0 until the last one ends."""

    def __init__(
        self, num_actors: int, *, record: bool = False, launches_in_order: bool = False
    ) -> None:
        self.actors = [Actor(index) for index in range(num_actors)]
        self.activities: list[Activity] = []
        self.now = 0.0
        self._record = record
        self._launches_in_order = launches_in_order
        self._running: list[Work] = []
        self._joint: dict[int, Work] = {}  # by submission number

    def submit(self, actor: Actor, work: Work, number: int) -> Work:
        """Queues work in an actor's stream; joint work of one number is one job for all actors."""
        if work.members > 1:
            joint = self._joint.setdefault(number, work)
            if joint is not work:  # it waits for all actors, and is as slow as the slowest
                joint.after += work.after
                joint.left = max(joint.left, work.left)
                work = joint
        work.submitted.append(actor.index)
        if self._launches_in_order and (work.job.intra or work.job.inter):
            work.is_ordered = True
            actor.launches.append(work)
        stream = actor.streams.setdefault(work.stream, deque())
        stream.append(work)
        if stream[0] is work:
            self._come_to_front(work)
        return work

    def run(self, programs: Iterable[Program]) -> float:
        """Runs all programs; returns the time at which the last one ends."""
        for actor, program in zip(self.actors, programs, strict=True):
            actor.program = program
            self._advance(actor)
        while any(actor.finished is None for actor in self.actors):
            self._step()
        return self.now

    def _come_to_front(self, work: Work) -> None:
        work.arrived += 1
        self._start_if_ready(work)

    def _start_if_ready(self, work: Work) -> None:
        if work.running or work.arrived < work.members or not all(w.done for w in work.after):
            return
        ordered = [self.actors[index].launches for index in work.submitted if work.is_ordered]
        if any(launches[0] is not work for launches in ordered):
            return
        work.running, work.start = True, self.now
        self._running.append(work)
        for launches in ordered:
            launches.popleft()
        for launches in ordered:
            if launches:
                self._start_if_ready(launches[0])

    def _advance(self, actor: Actor) -> None:
        """Runs a program until it computes or has to wait."""
        assert actor.program is not None
        for request in actor.program:
            if isinstance(request, Compute):
                if request.seconds > _TINY:
                    actor.computing, actor.left, actor.start = request, request.seconds, self.now
                    return
            else:
                waiting = tuple(work for work in request.works if not work.done)
                if waiting:
                    actor.waiting, actor.start = waiting, self.now
                    return
        actor.finished = self.now

    def _step(self) -> None:
        """Advances to the next end of a computation or of a job."""
        self._set_rates()
        speeds = [self._compute_speed(actor) for actor in self.actors]
        times = [work.left / work.rate for work in self._running]
        times += [
            actor.left / speed
            for actor, speed in zip(self.actors, speeds, strict=True)
            if actor.computing is not None
        ]
        assert times, f"a deadlock: {[actor.waiting for actor in self.actors]}"
        passed = min(times)
        self.now += passed
        for work in self._running:
            work.left -= passed * work.rate
        for actor, speed in zip(self.actors, speeds, strict=True):
            if actor.computing is not None:
                actor.left -= passed * speed
            elif actor.waiting:
                kind = self._blocking_kind(actor)
                actor.exposed[kind] = actor.exposed.get(kind, 0.0) + passed
        for work in [work for work in self._running if work.left <= _TINY]:
            self._finish(work)
        for actor in self.actors:
            self._wake(actor)

    def _set_rates(self) -> None:
        intra: list[float] = [0.0] * len(self.actors)
        inter: list[float] = [0.0] * len(self.actors)
        cpu: list[float] = [0.0] * len(self.actors)
        for work in self._running:
            for index in work.submitted:
                intra[index] += work.job.intra
                inter[index] += work.job.inter
                cpu[index] += work.job.cpu
        for work in self._running:
            slowdown = 1.0
            for index in work.submitted:
                slowdown = max(
                    slowdown,
                    intra[index] if work.job.intra else 0.0,
                    inter[index] if work.job.inter else 0.0,
                    cpu[index] if work.job.cpu else 0.0,
                )
            if any(self.actors[index].computing for index in work.submitted):
                slowdown = max(slowdown, work.job.slowed)
            work.rate = 1.0 / slowdown

    def _compute_speed(self, actor: Actor) -> float:
        taken = sum(
            work.job.cpu * work.rate for work in self._running if actor.index in work.submitted
        )
        return max(_LEAST_COMPUTE, 1.0 - taken)

    def _blocking_kind(self, actor: Actor) -> str:
        """The kind of the first unfinished work that an actor needs."""
        blocker = actor.waiting[0].blocker()
        queue = actor.streams.get(blocker.stream)
        return queue[0].kind if queue else blocker.kind

    def _finish(self, work: Work) -> None:
        work.done, work.running = True, False
        self._running.remove(work)
        use, axes = work.stream
        stream = f"{use} {'+'.join(map(str, axes))}" if self._record else use
        for index in work.submitted:
            actor = self.actors[index]
            self._add_span(index, stream, work.name, work.kind, work.start)
            queue = actor.streams[work.stream]
            assert queue.popleft() is work, f"{work.name} is not first in its stream"
            if queue:
                self._come_to_front(queue[0])
        for actor in self.actors:
            for queue in actor.streams.values():
                if queue and not queue[0].running:
                    self._start_if_ready(queue[0])

    def _wake(self, actor: Actor) -> None:
        if actor.computing is not None and actor.left <= _TINY:
            done = actor.computing
            took = self.now - actor.start
            actor.computed[done.kind] = actor.computed.get(done.kind, 0.0) + took
            self._add_span(actor.index, "compute", done.name, done.kind, actor.start)
            actor.computing = None
            self._advance(actor)
        elif actor.waiting and all(work.done for work in actor.waiting):
            self._add_span(actor.index, "wait", "wait", "wait", actor.start)
            actor.waiting = ()
            self._advance(actor)

    def _add_span(self, index: int, stream: str, name: str, kind: str, start: float) -> None:
        if self._record:
            self.activities.append(Activity(index, stream, name, kind, start, self.now))
