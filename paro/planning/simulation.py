"""Discrete-event simulation of training threads, communication streams and shared links."""

# In: one actor for each group (its ranks all act alike), with a speed and the program of the
# training thread, which computes, queues work in comm streams (at no cost) and waits for work. Out:
# the time at which the last program ends; for every actor, computed and exposed seconds.
#
# A stream runs work in the order of queueing; work starts when the work that it comes after is
# done. Work between groups starts when it is first in the stream of every group, and with ordered
# launches only after all work that its actors have queued earlier. Running jobs share links: if the
# shares of time for which jobs use a link sum to s > 1, each runs at 1 / s. The thread loses the
# processor time that jobs use; jobs and computing slow each other down as measured.

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

from paro.machine.collective_time import ParallelJobs, StreamAxes, TimedJob
from paro.machine.machine import GroupSpeed

_LEAST_COMPUTE = 0.05  # least share of its speed at which a computing thread makes progress
_TINY = 1e-12  # seconds below which remaining work counts as done


class QueuedJobs(NamedTuple):
    """Jobs for the comm streams of one `use`; each phase starts when the previous has ended."""

    name: str
    kind: str  # the kind of exposed time while the thread waits for the work
    use: str
    phases: tuple[ParallelJobs, ...]
    joins: bool = False  # whether all groups take part, even if nothing is sent between groups


class ComputeOp(NamedTuple):
    """A program's request to compute."""

    seconds: float
    name: str
    kind: str


class QueueOp(NamedTuple):
    """A program's request to queue work under a key, one part after the other."""

    key: Hashable
    parts: tuple[QueuedJobs, ...]
    of: str = ""  # the unit or buffer, for the name of the activity
    after: Hashable = None  # the key of work that must be done before this work starts


class WaitOp(NamedTuple):
    """A program's request to wait for the work queued last under a key, if any."""

    key: Hashable


Program = Iterator[ComputeOp | QueueOp | WaitOp]


class StreamActivity(NamedTuple):
    """An activity in a stream of an actor, from `start` to `end` in seconds."""

    actor: int
    stream: str
    name: str
    kind: str
    start: float
    end: float


@dataclass(slots=True, eq=False)
class _Work:
    """A job in a communication stream of one actor, or of all of them."""

    part: QueuedJobs
    of: str
    job: TimedJob
    members: int  # the number of actors that take part
    after: _Works  # work that must be done before this job starts
    left: float = 0.0  # remaining seconds at full speed, as if links were not shared
    submitted: list[int] = field(default_factory=list)  # the actors that have queued the job
    is_ordered: bool = False  # whether the job must start in the order of its actors' launches
    running: bool = False
    done: bool = False
    start: float = 0.0
    rate: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.part.name} {self.of}".strip()

    def blocker(self) -> _Work:
        """Return the unfinished work at the start of the chain for which this job waits."""
        return next((work.blocker() for work in self.after if not work.done), self)


_Works = tuple[_Work, ...]


@dataclass(slots=True, eq=False)
class SimulatedRanks:
    """The state of the ranks of a group, or of several groups of equal speed."""

    index: int
    speed: GroupSpeed
    program: Program
    queued: dict[Hashable, _Works] = field(default_factory=dict)  # work not yet waited for, by key
    num_jobs: int = 0
    streams: defaultdict[tuple[str, StreamAxes], deque[_Work]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    computing: ComputeOp | None = None
    left: float = 0.0
    rate: float = 1.0
    start: float = 0.0
    waiting: _Works = ()
    finished: bool = False
    launches: deque[_Work] = field(default_factory=deque)  # jobs that must start in this order
    exposed: dict[str, float] = field(default_factory=dict)
    computed: dict[str, float] = field(default_factory=dict)


@dataclass(eq=False)
class Simulation:
    """A simulation of programs, each at the speed of its actor, from time 0 to the last end."""

    programs: Iterable[tuple[GroupSpeed, Program]]
    _: KW_ONLY
    record: bool = False
    launches_in_order: bool = False
    slowed: Sequence[float] = ()  # factors of compute time by number of running collectives

    def __post_init__(self) -> None:
        self.actors = [
            SimulatedRanks(index, *program) for index, program in enumerate(self.programs)
        ]
        self.activities: list[StreamActivity] = []
        self.now = 0.0
        self._running: list[_Work] = []
        self._joint: dict[int, _Work] = {}  # jobs of all actors, by their number in each program

    def run(self) -> float:
        """Run all programs; return the time at which the last one ends."""
        for actor in self.actors:
            self._advance(actor)
        while not all(actor.finished for actor in self.actors):
            self._step()
        return self.now

    def _queue(self, actor: SimulatedRanks, request: QueueOp) -> None:
        """Queue the phases of a request, each after the previous phase."""
        works = actor.queued.get(request.after, ())
        for part in request.parts:
            for phase in part.phases:
                is_joint = part.joins or any(job.inter for job in phase)
                members = len(self.actors) if is_joint else 1
                jobs = [_Work(part, request.of, job, members, works) for job in phase]
                works = tuple(self._submit(actor, work) for work in jobs)
        actor.queued[request.key] = works

    def _submit(self, actor: SimulatedRanks, work: _Work) -> _Work:
        """Queue a job in an actor's stream; return it, or the one job that all actors share."""
        job, speed = work.job, actor.speed
        work.left = job.seconds / (speed.inter if job.inter else speed.intra if job.intra else 1.0)
        actor.num_jobs += 1
        if work.members > 1:
            joint = self._joint.setdefault(actor.num_jobs, work)
            if joint is not work:  # a shared job waits for all actors, at the slowest one's speed
                joint.after += work.after
                joint.left = max(joint.left, work.left)
                work = joint
        work.submitted.append(actor.index)
        if self.launches_in_order and (job.intra or job.inter):
            work.is_ordered = True
            actor.launches.append(work)
        queue = actor.streams[work.part.use, job.stream]
        queue.append(work)
        if queue[0] is work:
            self._start_if_ready(work)
        return work

    def _start_if_ready(self, work: _Work) -> None:
        """Start a job that is first in all of its streams and among its actors' launches."""
        some_left = len(work.submitted) < work.members
        if work.running or some_left or not all(w.done for w in work.after):
            return
        actors = [self.actors[index] for index in work.submitted]
        stream = work.part.use, work.job.stream
        for actor in actors:
            in_turn = not work.is_ordered or actor.launches[0] is work
            if not in_turn or actor.streams[stream][0] is not work:
                return
        work.running, work.start = True, self.now
        self._running.append(work)
        ordered = [actor.launches for actor in actors if work.is_ordered]
        for launches in ordered:
            launches.popleft()
        for launches in ordered:
            if launches:
                self._start_if_ready(launches[0])

    def _advance(self, actor: SimulatedRanks) -> None:
        """Run an actor's program until it computes or has to wait."""
        for request in actor.program:
            if isinstance(request, ComputeOp):
                seconds = request.seconds / actor.speed.compute
                if seconds > _TINY:
                    actor.computing, actor.left, actor.start = request, seconds, self.now
                    return
                continue
            if isinstance(request, QueueOp):
                self._queue(actor, request)
                continue
            works = actor.queued.pop(request.key, ())
            if works and not all(work.done for work in works):
                actor.waiting, actor.start = tuple(w for w in works if not w.done), self.now
                return
        actor.finished = True

    def _step(self) -> None:
        """Advance to the next end of a computation or of a job."""
        self._set_rates()
        computing = [actor for actor in self.actors if actor.computing is not None]
        for actor in computing:
            actor.rate = self._compute_speed(actor)
        under_way: list[_Work | SimulatedRanks] = [*self._running, *computing]
        times = [job.left / job.rate for job in under_way]
        assert times, f"a deadlock: {[actor.waiting for actor in self.actors]}"
        passed = min(times)
        self.now += passed
        for job in under_way:
            job.left -= passed * job.rate
        for actor in self.actors:
            if actor.waiting:
                blocker = actor.waiting[0].blocker()  # the first unfinished work
                queue = actor.streams[blocker.part.use, blocker.job.stream]
                kind = (queue[0] if queue else blocker).part.kind
                actor.exposed[kind] = actor.exposed.get(kind, 0.0) + passed
        for work in [work for work in self._running if work.left <= _TINY]:
            self._finish(work)
        for actor in self.actors:
            self._wake(actor)

    def _set_rates(self) -> None:
        """Set the speed of running jobs, by the sharing of links and processors."""
        loads = [[0.0, 0.0, 0.0] for _ in self.actors]  # links inside and between, processor
        for work in self._running:
            _, _, intra, inter, cpu, _ = work.job
            for index in work.submitted:
                load = loads[index]
                load[0] += intra
                load[1] += inter
                load[2] += cpu
        for work in self._running:
            job, slowdown = work.job, 1.0
            for index in work.submitted:
                intra, inter, cpu = loads[index]
                slowed = job.slowed if self.actors[index].computing else 1.0
                shared = job.intra and intra, job.inter and inter, job.cpu and cpu
                slowdown = max(slowdown, slowed, *shared)
            work.rate = 1.0 / slowdown

    def _compute_speed(self, actor: SimulatedRanks) -> float:
        """Return the speed of a computing thread while jobs run in its streams."""
        of_actor = [work for work in self._running if actor.index in work.submitted]
        speed = max(_LEAST_COMPUTE, 1.0 - sum(work.job.cpu * work.rate for work in of_actor))
        if not self.slowed:
            return speed
        running = sum(work.job.intra + work.job.inter > 0.0 for work in of_actor)
        return speed / self.slowed[min(running, len(self.slowed) - 1)]

    def _finish(self, work: _Work) -> None:
        work.done, work.running = True, False
        self._running.remove(work)
        part, axes = work.part, work.job.stream
        for index in work.submitted:
            actor = self.actors[index]
            if self.record:
                stream = f"{part.use} {'+'.join(map(str, axes))}"
                self._add_span(index, stream, work.name, part.kind, work.start)
            queue = actor.streams[part.use, axes]
            assert queue.popleft() is work, f"{work.name} is not first in its stream"
            if queue:
                self._start_if_ready(queue[0])
        for actor in self.actors:
            for queue in actor.streams.values():
                if queue and not queue[0].running:
                    self._start_if_ready(queue[0])

    def _wake(self, actor: SimulatedRanks) -> None:
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
        if self.record:
            self.activities.append(StreamActivity(index, stream, name, kind, start, self.now))
