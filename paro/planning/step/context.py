"""Time of attention where ranks share samples: what travels, and while how much is computed."""

# A pass over a block's attention queues work, computes shares of the pass, and waits for what is
# queued. Turns of a ring are alike, so they are one: n turns in each of which a message of m
# seconds travels while p are computed take n max(m, p) = max(n m, n p). The same holds of the
# pieces in which heads are exchanged.
#
#     ring       Ri ranks inside, Ro outside, p = 1 / (Ri Ro) of the pass: in a turn Ri - 1 messages
#                of the inner ring travel beside as many p, and one of the outer beside Ri of them;
#                nothing travels outside in the last turn. In backward sums follow one step behind:
#                the last one of each ring overlaps with nothing.
#     gather     beside the own 1/R; in backward the reduce-scatter overlaps with nothing
#     exchange   the first piece in and the last out overlap with nothing, the others with all else
#
# A recomputation of the core alone ends before the last output has travelled; one of a block that
# kept what attention computes exchanges heads alone.

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import chain

from paro.collectives.schedule import Op
from paro.planning.context_parallel import Messages, messages_of
from paro.planning.machine.collective_time import CollectiveTimes, ParallelJobs, TimedJob
from paro.planning.machine.machine import GroupSpeed
from paro.planning.micro_batch import MicroBatch
from paro.planning.step.comm_costs import THREAD, busy_of
from paro.planning.step.computing import Computing
from paro.planning.step.simulation import Compute, Program, Queue, Queued, Simulation, Wait
from paro.step.actions import Move, Verb
from paro.topology import AxisSpan, Topology

KIND = "context"  # of exposed time, and the use of the comm streams


class Attending(Enum):
    """A pass over a block's attention."""

    FORWARD = "forward"
    CORE = "core"  # a recomputation of the core alone
    KEPT = "kept"  # a recomputation of a block that kept what attention computes
    BACKWARD = "backward"

    @property
    def num_forwards(self) -> int:
        """How many forwards compute for as long."""
        return {Attending.BACKWARD: 2, Attending.KEPT: 0}.get(self, 1)


_ATTENDS = {
    Verb.FORWARD: (Attending.FORWARD,),
    Verb.RECOMPUTE: (Attending.FORWARD,),
    Verb.GRADIENTS: (Attending.CORE, Attending.BACKWARD),
}


# What a pass does, one after the other; a number is a share of its computation.
Pass = tuple[Queue | Wait | float, ...]


@dataclass(frozen=True, kw_only=True)
class ContextCosts:
    """What attention of a micro-batch sends in a run with groups of `group_size`."""

    computing: Computing
    times: CollectiveTimes
    group_size: int
    overlaps: bool  # whether anything travels while the thread computes

    @property
    def _batch(self) -> MicroBatch:
        return self.computing.batch

    @cached_property
    def _messages(self) -> Messages:
        return messages_of(self.computing.model, self._batch)

    @cached_property
    def _topology(self) -> Topology:
        machine = self.times.machine
        return self._batch.context.topology(
            world_size=machine.world_size, group_size=self.group_size
        )

    @cached_property
    def passes(self) -> dict[Attending, Pass]:
        """Every kind of pass."""
        return {one: self._exchanged(one) for one in Attending}

    def attended(self, move: Move) -> tuple[tuple[Attending, float], ...]:
        """The passes over attention that an action makes, and the compute time of each."""
        verb, number, *_ = move
        per_unit = self.computing.per_unit
        whole = per_unit[number].get(verb, 0.0) if 0 < number < len(per_unit) - 1 else 0.0
        if verb not in _ATTENDS or not whole:
            return ()
        recompute = self.computing.model.recompute
        has_core = recompute is not None and recompute.core_attention
        passes = [one for one in _ATTENDS[verb] if has_core or one is not Attending.CORE]
        if verb is Verb.RECOMPUTE and self.computing.model.keeps_core:
            return ((Attending.KEPT, 0.0),)
        forward = self.computing.attention_seconds
        # A share of backward is counted as before the first gradient.
        forward *= min(1.0, whole / (forward * sum(one.num_forwards for one in passes)))
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
            for load, took in busy_of(parts, waits=False).items():
                busy[load] += count * took
        return busy

    def _exchanged(self, attending: Attending) -> Pass:
        layout, messages = self._batch.context, self._messages
        within = self._within(attending)
        if layout.heads == 1:
            return within
        span, more = layout.heads_span(self._topology), messages.pieces - 1
        there, back = (
            self.times.exchange(span, num_bytes // messages.pieces)
            for num_bytes in (messages.there, messages.back)
        )
        first, last = (back, there) if attending is Attending.BACKWARD else (there, back)
        return (
            self._queue("first", _repeated((first, 1)), waits=True),
            self._queue("others", _repeated((there, more), (back, more))),
            *within,
            Wait("others"),
            self._queue("last", _repeated((last, attending is not Attending.CORE)), waits=True),
        )

    def _within(self, attending: Attending) -> Pass:
        if attending is Attending.KEPT:
            return ()
        gathers = self._batch.context.gathers
        return self._gathered(attending) if gathers else self._turned(attending)

    def _gathered(self, attending: Attending) -> Pass:
        """Keys and values of all places by a collective."""
        layout, messages = self._batch.context, self._messages
        span, own = layout.ring_span(self._topology), 1 / layout.ring
        phases = self.times.phases(Op.ALL_GATHER, span, layout.ring * messages.keys)
        found = self._queue("keys", phases), own, Wait("keys"), 1 - own
        if attending is not Attending.BACKWARD:
            return found
        phases = self.times.phases(Op.REDUCE_SCATTER, span, layout.ring * messages.grads)
        return *found, self._queue("grads", phases, waits=True)

    def _turned(self, attending: Attending) -> Pass:
        """Keys and values go round the rings."""
        rings = self._batch.context.rings(self._topology)
        inner, outer = rings
        steps, turns = map(_size, rings)
        share, sums = 1 / (steps * turns), attending is Attending.BACKWARD
        before_last = (turns - 1) * (steps - 1)
        return (
            self._queue("outer", self._hops(outer, turns - 1, sums * (turns - 2))),
            self._queue("inner", self._hops(inner, before_last, sums * before_last)),
            before_last * share,
            Wait("inner"),
            (turns - 1) * share,
            Wait("outer"),
            self._queue("inner", self._hops(inner, steps - 1, sums * (steps - 2))),
            (steps - 1) * share,
            Wait("inner"),
            share,
            self._queue("inner", self._hops(inner, 0, sums * min(1, steps - 1)), waits=True),
            self._queue("outer", self._hops(outer, 0, sums * min(1, turns - 1)), waits=True),
        )

    def _queue(self, key: str, phases: tuple[ParallelJobs, ...], *, waits: bool = False) -> Queue:
        part = Queued("attention", KIND, KIND, phases)
        return Queue(key, (part,), waits=waits or not self.overlaps)

    def _hops(self, span: AxisSpan, keys: int, sums: int) -> tuple[ParallelJobs, ...]:
        """Messages to the next rank of a ring: keys and values, and sums of their gradients."""
        messages = self._messages
        return _repeated(
            *(
                (self.times.hop(span, num_bytes // messages.pieces), messages.pieces * number)
                for num_bytes, number in ((messages.keys, keys), (messages.grads, sums))
                if number > 0
            )
        )


def _repeated(*jobs: tuple[TimedJob, int]) -> tuple[ParallelJobs, ...]:
    """So many times each job."""
    return tuple((job._replace(seconds=job.seconds * n),) for job, n in jobs if n)


def _size(span: AxisSpan) -> int:
    return math.prod(axis.size for axis in span)
