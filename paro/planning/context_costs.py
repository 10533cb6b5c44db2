"""Time of attention where ranks share samples: what it waits for, and what it keeps busy."""

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
from paro.planning.context_parallel import (
    Attending,
    Attention,
    AttentionOfBlocks,
    Message,
    Pass,
    Send,
)
from paro.planning.sending import To
from paro.planning.simulation import Compute, Program, Queue, Queued, Simulation, Wait
from paro.step.actions import Move, Verb

KIND = "context"  # of exposed time, and the use of the comm streams


@dataclass(frozen=True, kw_only=True)
class ContextCosts:
    """What attention of a micro-batch sends in a run with groups of `group_size`."""

    computing: Computing
    times: CollectiveTimes
    trained: frozenset[str]  # names of parameters
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
        return {one: tuple(self._timed(attention.does(one))) for one in Attending}

    @cached_property
    def _blocks(self) -> AttentionOfBlocks:
        return AttentionOfBlocks(config=self.computing.model, trained=self.trained)

    def attended(self, move: Move) -> tuple[tuple[Attending, float], ...]:
        """Return the passes over attention that an action makes, and the compute time of each."""
        verb, number, *_ = move
        passes = self._blocks.passes(move)
        whole = self.computing.per_unit[number].get(verb, 0.0) if passes else 0.0
        if not whole:
            return ()
        forward, forwards = 0.0, sum(one.num_forwards for one in passes)
        if forwards:  # a share of backward is counted as before the first gradient
            forward = min(self.computing.attention_seconds(number), whole / forwards)
        return tuple((one, one.num_forwards * forward) for one in passes)

    def program(self, move: Move, whole: Compute, name: str) -> Program:
        """Compute for an action; attention, which may wait for other ranks, is nearest the input.

        So it comes first in forward, and last in backward.
        """
        passes = self.attended(move)
        attention = (self._attend(*one, name, whole.kind) for one in passes)
        rest = (whole._replace(seconds=whole.seconds - sum(seconds for _, seconds in passes)),)
        parts = (rest, *attention) if move[0] is Verb.GRADIENTS else (*attention, rest)
        return chain.from_iterable(parts)

    def _attend(self, attending: Attending, seconds: float, name: str, kind: str) -> Program:
        """What the training thread does for a pass over a unit's attention."""
        for request in self.passes[attending]:
            if isinstance(request, float):
                yield Compute(request * seconds, f"{kind} {name}: attention", kind)
            else:
                yield request._replace(of=name) if isinstance(request, Queue) else request

    def exposed(self, attending: Attending, seconds: float) -> float:
        """For how long a pass waits for other ranks if nothing else is sent."""
        alone = GroupSpeed(num_groups=1), self._attend(attending, seconds, "", "")
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
            requests = self.passes[attending]
            parts = (part for one in requests if isinstance(one, Queue) for part in one.parts)
            loads = {**busy_of(parts), THREAD: self.exposed(attending, seconds)}
            for load, took in loads.items():
                busy[load] += count * took
        return busy

    def _timed(self, does: Pass) -> Iterator[Queue | Wait | float]:
        for one in does:
            if isinstance(one, Send):
                phases = tuple(chain.from_iterable(map(self._phases, one.messages)))
                yield Queue(one.key, (Queued("attention", KIND, KIND, phases),))
                if not self.overlaps:
                    yield Wait(one.key)
            else:
                yield Wait(one) if isinstance(one, str) else one

    def _phases(self, message: Message) -> tuple[ParallelJobs, ...]:
        if isinstance(message.to, Op):
            return self.times.phases(message.to, message.span, message.num_bytes)
        if not message.number:
            return ()
        time = self.times.exchange if message.to is To.EACH else self.times.hop
        job = time(message.span, message.num_bytes)
        return ((job._replace(seconds=job.seconds * message.number),),)
