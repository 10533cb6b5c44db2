"""Time of attention where ranks share samples: what it waits for, and what it keeps busy."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from paro.collectives.schedule import Op
from paro.planning.context_parallel import Attending, Attention, Message, Send, To, attends
from paro.planning.machine.collective_time import CollectiveTimes, ParallelJobs
from paro.planning.machine.machine import GroupSpeed
from paro.planning.step.comm_costs import THREAD, busy_of
from paro.planning.step.computing import Computing
from paro.planning.step.simulation import Compute, Program, Queue, Queued, Simulation, Wait
from paro.step.actions import Move, Verb

KIND = "context"  # of exposed time, and the use of the comm streams


@dataclass(frozen=True, kw_only=True)
class ContextCosts:
    """What attention of a micro-batch sends in a run with groups of `group_size`."""

    computing: Computing
    times: CollectiveTimes
    group_size: int
    overlaps: bool  # whether anything travels while the thread computes

    @cached_property
    def passes(self) -> dict[Attending, tuple[Queue | Wait | float, ...]]:
        """What every kind of pass does; a number computes this share of it."""
        batch, ranks = self.computing.batch, self.times.machine.world_size
        attention = Attention(
            config=self.computing.model,
            batch=batch,
            topology=batch.context.topology(world_size=ranks, group_size=self.group_size),
        )
        return {one: tuple(map(self._timed, attention.does(one))) for one in Attending}

    def attended(self, move: Move) -> tuple[tuple[Attending, float], ...]:
        """The passes over attention that an action makes, and the compute time of each."""
        verb, number, *_ = move
        per_unit = self.computing.per_unit
        whole = per_unit[number].get(verb, 0.0) if 0 < number < len(per_unit) - 1 else 0.0
        passes = attends(self.computing.model, verb) if whole else ()
        forward, forwards = self.computing.attention_seconds, sum(o.num_forwards for o in passes)
        if forwards:  # a share of backward is counted as before the first gradient
            forward *= min(1.0, whole / (forward * forwards))
        return tuple((one, one.num_forwards * forward) for one in passes)

    def program(self, attending: Attending, seconds: float, name: str, kind: str) -> Program:
        """What the training thread does for a pass over a unit's attention."""
        for request in self.passes[attending]:
            if isinstance(request, float):
                yield Compute(request * seconds, f"{kind} {name}: attention", kind)
            else:
                yield request._replace(of=name) if isinstance(request, Queue) else request

    def exposed(self, attending: Attending, seconds: float) -> float:
        """For how long a pass waits for other ranks if nothing else is sent."""
        alone = GroupSpeed(num_groups=1), self.program(attending, seconds, "", "")
        return Simulation([alone]).run() - seconds

    @cached_property
    def loads(self) -> tuple[Mapping[Hashable, float], Mapping[Hashable, float]]:
        """What a forward, and a backward, keeps busy for attention, in seconds.

        Links, by name, and comm streams; the thread, by waiting at least so long.
        """
        return self._load(Verb.FORWARD), self._load(Verb.RECOMPUTE, Verb.GRADIENTS)

    def _load(self, *verbs: Verb) -> Mapping[Hashable, float]:
        moves = ((verb, number) for verb in verbs for number in range(len(self.computing.per_unit)))
        busy: defaultdict[Hashable, float] = defaultdict(float)
        for (attending, seconds), count in Counter(chain(*map(self.attended, moves))).items():
            busy[THREAD] += count * self.exposed(attending, seconds)
            queues = (one for one in self.passes[attending] if isinstance(one, Queue))
            parts = chain.from_iterable(queue.parts for queue in queues)
            for load, took in busy_of(parts).items():
                if load != THREAD:
                    busy[load] += count * took
        return busy

    def _timed(self, does: Send | float | str) -> Queue | Wait | float:
        if isinstance(does, float):
            return does
        if isinstance(does, str):
            return Wait(does)
        phases = tuple(chain.from_iterable(map(self._phases, does.messages)))
        part = Queued("attention", KIND, KIND, phases)
        return Queue(does.key, (part,), waits=does.waits or not self.overlaps)

    def _phases(self, message: Message) -> tuple[ParallelJobs, ...]:
        if isinstance(message.to, Op):
            return self.times.phases(message.to, message.span, message.num_bytes)
        if not message.number:
            return ()
        time = self.times.exchange if message.to is To.EACH else self.times.hop
        job = time(message.span, message.num_bytes)
        return ((job._replace(seconds=job.seconds * message.number),),)
