"""The time of attention in a context-parallel group, with its waits and its busy links."""

# In: the schedule of each attention pass (forward, recomputation or backward; context_parallel.py),
# the compute time of the actions that contain it, and the times of messages on a machine. Out: for
# the simulation, the requests of the training thread in an action: compute, queue, wait. For the
# lower bound, the seconds for which passes keep links and comm streams busy.

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from paro.collectives.schedule import Op
from paro.machine.collective_time import CollectiveTimes, ParallelJobs
from paro.machine.machine import GroupSpeed
from paro.planning.comm_costs import THREAD, busy_of
from paro.planning.computing import Computing
from paro.planning.context_parallel import AttentionPass, ContextAttention, Message, Send
from paro.planning.sending import To
from paro.planning.simulation import Compute, Program, Queue, Queued, Simulation, Wait
from paro.step.actions import Move, Verb

KIND = "context"  # the kind of exposed time, and the use of the comm streams


@dataclass(frozen=True, kw_only=True)
class ContextCosts:
    """The times of attention's passes for a micro-batch of a context-parallel group."""

    computing: Computing
    times: CollectiveTimes

    @cached_property
    def attention(self) -> ContextAttention:
        """The attention of the micro-batch that is computed."""
        return ContextAttention(self.computing.run)

    def program(self, move: Move, whole: Compute, name: str) -> Program:
        """Yield the requests of an action.

        Attention, which may wait, comes before the other work in forward, after it in backward.
        """
        passes = self.passes(move)
        attention = (self._requests(*one, name, whole.kind) for one in passes)
        rest = (whole._replace(seconds=whole.seconds - sum(seconds for _, seconds in passes)),)
        parts = (rest, *attention) if move[0] is Verb.GRADIENTS else (*attention, rest)
        return chain.from_iterable(parts)

    def passes(self, move: Move) -> tuple[tuple[AttentionPass, float], ...]:
        """Return the attention passes of an action, each with its compute time."""
        verb, number, *_ = move
        passes = self.attention.passes(move)
        whole = self.computing.per_unit[number].get(verb, 0.0) if passes else 0.0
        forward, forwards = 0.0, sum(one.num_forwards for one in passes)
        if not whole:
            return ()
        if forwards:  # a share of backward is counted as before the first gradient
            forward = min(self.computing.attention_seconds(number), whole / forwards)
        return tuple((one, one.num_forwards * forward) for one in passes)

    def _requests(self, kind: AttentionPass, seconds: float, unit: str, verb: str) -> Program:
        for request in self._schedules[kind]:
            if isinstance(request, float):
                yield Compute(request * seconds, f"{verb} {unit}: attention", verb)
            else:
                yield request._replace(of=unit) if isinstance(request, Queue) else request

    @cached_property
    def _schedules(self) -> dict[AttentionPass, tuple[Queue | Wait | float, ...]]:
        return {kind: tuple(self._timed(kind)) for kind in AttentionPass}

    def _timed(self, kind: AttentionPass) -> Iterator[Queue | Wait | float]:
        for one in self.attention.schedule(kind):
            if isinstance(one, Send):
                phases = tuple(chain.from_iterable(map(self._phases, one.messages)))
                yield Queue(one.key, (Queued("attention", KIND, KIND, phases),))
                if not self.computing.run.overlaps:
                    yield Wait(one.key)
            else:
                yield Wait(one) if isinstance(one, str) else one

    def _phases(self, message: Message) -> tuple[ParallelJobs, ...]:
        to, span, num_bytes, number = message
        if isinstance(to, Op):
            return self.times.phases(to, span, num_bytes)
        time = self.times.exchange if to is To.EACH else self.times.hop
        job = time(span, num_bytes)
        return ((job._replace(seconds=job.seconds * number),),) if number else ()

    def exposed(self, kind: AttentionPass, seconds: float) -> float:
        """Simulate how long a pass waits for other ranks if nothing else is sent."""
        alone = GroupSpeed(num_groups=1), self._requests(kind, seconds, "", "")
        return Simulation([alone]).run() - seconds

    @cached_property
    def loads(self) -> tuple[Mapping[Hashable, float], Mapping[Hashable, float]]:
        """The busy seconds of attention in a forward, and in a backward of a micro-batch.

        Keys are links (by name), comm streams, and the thread, which waits at least so long.
        """
        return self._load(Verb.FORWARD), self._load(Verb.RECOMPUTE, Verb.GRADIENTS)

    def _load(self, *verbs: Verb) -> Mapping[Hashable, float]:
        moves = ((verb, number) for verb in verbs for number in range(len(self.computing.per_unit)))
        busy: defaultdict[Hashable, float] = defaultdict(float)
        for (kind, seconds), count in Counter(chain(*map(self.passes, moves))).items():
            requests = self._schedules[kind]
            parts = (part for one in requests if isinstance(one, Queue) for part in one.parts)
            loads = {**busy_of(parts), THREAD: self.exposed(kind, seconds)}
            for load, took in loads.items():
                busy[load] += count * took
        return busy
