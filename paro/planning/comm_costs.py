"""The communication of a run on a machine: the work of each action, and attention's waits."""

# Attention of a context-parallel group: from the schedule of each pass (forward, recomputation or
# backward; context_parallel.py), the compute time of the actions that contain it, and the times of
# messages on a machine follow the requests of the training thread in an action: compute, queue,
# wait. For the lower bound, the seconds for which passes keep links and comm streams busy.

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from typing import NamedTuple

from paro.collectives.schedule import Op
from paro.machine.collective_time import CollectiveTimes, ParallelJobs, TimedJob
from paro.machine.machine import Device, GroupSpeed
from paro.planning.computing import ComputeTimes, coding_seconds, device_of
from paro.planning.context_parallel import (
    AttentionMessage,
    AttentionPass,
    AttentionSchedules,
    AttentionSend,
    AttentionShare,
)
from paro.planning.sending import Receivers
from paro.planning.simulation import ComputeOp, Program, QueuedJobs, QueueOp, Simulation, WaitOp
from paro.planning.step_counts import QUEUES, StepCounts
from paro.precision import BYTES_OF
from paro.spec.run_spec import RunSpec
from paro.spec.sharding_spec import Collective, ShardingSpec
from paro.step.actions import PASS_OF, Action, ActionKind
from paro.topology import StreamKind

# Bytes that all operations together read and write to quantize, dequantize or transform an element,
# counted in paro/quantization/blocks.py.
_ENCODED_BYTES = 70
_DECODED_BYTES = 40
_TRANSFORM_BYTES = 60
CODING_BYTES = _ENCODED_BYTES + _DECODED_BYTES + _TRANSFORM_BYTES
# Error feedback dequantizes the old error and the sent values, and quantizes the new error, with
# three operations on fp32 values.
_FEEDBACK_BYTES = 2 * _DECODED_BYTES + _ENCODED_BYTES + 3 * 12

# The kind of exposed time of the work that an action queues, by its name in `PLANNED_WAITS` but for
# outer steps.
_KINDS = {
    ActionKind.GATHER: "gather",
    ActionKind.REDUCE: "reduce",
    ActionKind.GRAD_SYNC: "finish",
    ActionKind.PARAM_ALL_GATHER: "publish",
    ActionKind.SHIFT: "gather",
    ActionKind.SHIFT_BACK: "gather",
    ActionKind.SHIFT_GRADS: "reduce",
    ActionKind.OUTER_REDUCE: "outer",
    ActionKind.OUTER_GATHER: "outer",
    ActionKind.OUTER_SPREAD: "outer",
}
_CONTEXT = "context"  # the kind of attention's exposed time, and the use of its comm streams
THREAD = "thread"  # the name of the training thread among links and comm streams that are busy


def busy_of(work: Iterable[QueuedJobs]) -> Mapping[Hashable, float]:
    """Compute for how long work keeps busy: links (by name), comm streams, a waiting thread."""
    busy: defaultdict[Hashable, float] = defaultdict(float)
    for use, phase in ((each.use, phase) for each in work for phase in each.phases):
        for job in phase:
            busy["intra"] += job.seconds * job.intra
            busy["inter"] += job.seconds * job.inter
            busy[use, job.stream] += job.seconds
        busy[THREAD] += max(job.seconds for job in phase)
    return busy


class BufferCosts(NamedTuple):
    """The work that the actions on a flat buffer queue."""

    queued: Mapping[ActionKind, tuple[QueuedJobs, ...]]
    # Seconds by link, stream or thread, of `busy_of`
    busy: Mapping[ActionKind, Mapping[Hashable, float]]
    # Bytes read and written to quantize or dequantize for an action.
    coding_bytes: Mapping[ActionKind, int]


@dataclass(frozen=True, kw_only=True)
class CommCosts:
    """The costs of all collectives of a run, whatever its micro-batches."""

    run: RunSpec
    counts: StepCounts
    specs: Sequence[ShardingSpec]  # of the buffers, by number
    times: CollectiveTimes

    @cached_property
    def at_once(self) -> frozenset[ActionKind]:
        """The actions whose collectives the training thread waits for at once, without overlap."""
        if not self.run.overlaps:
            return QUEUES
        return frozenset(PASS_OF) if self.run.materialize.in_place else frozenset()

    @property
    def device(self) -> Device:
        return device_of(self.times.machine)

    @cached_property
    def _native_times(self) -> CollectiveTimes:
        """The times of the backend's own algorithm."""
        return replace(self.times, algorithm="native")

    @cached_property
    def of_buffers(self) -> list[BufferCosts]:
        """The costs of every buffer, by number."""
        return self.counts.by_kind(lambda number: self._costs_of(self.specs[number]))

    @cached_property
    def coding_bytes(self) -> int:
        """The bytes that quantization reads and writes in a step; 0 without quantization."""
        return sum(sum(costs.coding_bytes.values()) for costs in self.of_buffers)

    def _costs_of(self, spec: ShardingSpec) -> BufferCosts:
        # The work that each action queues: collectives, or shifts.
        others = PASS_OF.values() if self.run.materialize.rotates else PASS_OF
        kinds = [kind for kind in _KINDS if kind not in others]
        works = ((kind, tuple(self._work(kind, spec.sent_by(kind)))) for kind in kinds)
        queued = {kind: work for kind, work in works if work}
        coding_bytes = self._add_copies(spec, queued) if spec.buffer.trains else {}
        return BufferCosts(queued, {kind: busy_of(queued[kind]) for kind in queued}, coding_bytes)

    def _work(self, kind: ActionKind, sent: Sequence[Collective]) -> Iterator[QueuedJobs]:
        """Yield the work of the collectives of an action, each on its comm stream."""
        wait_kind, exchanges = _KINDS[kind], [each.span for each in sent if each.is_exchange]
        for each in sent:
            use, span, num_bytes = each.stream_kind.value, each.span, each.num_bytes
            if kind in PASS_OF:
                phases = self.times.shift(span, num_bytes, self.run.materialize.in_place)
            elif each.is_exchange:  # the engine runs them as one job, on the stream of the first
                stream = tuple(axis.index for axis in exchanges[0])
                jobs = chain.from_iterable(self._native_times.phases(each.op, span, num_bytes))
                phases = tuple((job._replace(stream=stream),) for job in jobs)
            else:
                phases = self.times.phases(each.op, span, num_bytes)
            # On CPU ranks messages of weights and of gradients do not wait for each other.
            if kind is ActionKind.SHIFT_GRADS and self.device.cores is not None:
                use = "gradients"
            if phases:
                yield QueuedJobs(wait_kind, wait_kind, use, phases)

    def _add_copies(
        self, spec: ShardingSpec, queued: dict[ActionKind, tuple[QueuedJobs, ...]]
    ) -> dict[ActionKind, int]:
        """Add copies to a trainable buffer's collectives; return traffic to (de)quantize."""
        precision, numel = spec.precision, spec.layout.numel
        params, grads, optim = (numel // degree for degree in spec.strategy.degrees)
        wire, accumulate = BYTES_OF[precision.wire], BYTES_OF[precision.accumulate]
        copy_rate = self.device.memory_bytes_per_second
        coding_bytes: dict[ActionKind, int] = {}
        if reduced := queued.get(ActionKind.REDUCE):
            added = grads * (wire + 2 * accumulate) / copy_rate
            add = self._beside("add", reduced[-1], added, at=-1)
            queued[ActionKind.REDUCE] = (*reduced, add)
        if synced := queued.get(ActionKind.GRAD_SYNC):
            exchange = spec.quantized_grad_sync
            num_exact = len(synced) - len(exchange)
            if exchange:
                feedback = _FEEDBACK_BYTES if precision.inter_grad_error_feedback else 0
                encoded = numel // exchange[0].span[0].inner
                coding_bytes[ActionKind.GRAD_SYNC] = encoded * (CODING_BYTES + feedback)
                seconds = coding_seconds(self.device, coding_bytes[ActionKind.GRAD_SYNC])
                code = self._beside("code", synced[num_exact], seconds)
                synced = (*synced[:num_exact], code, *synced[num_exact:])
            if num_exact and wire != accumulate:  # types are converted before and after
                converted = (grads + optim) * spec.unit.bucket_size * (wire + accumulate)
                synced = (self._beside("convert", synced[0], converted / copy_rate), *synced)
            queued[ActionKind.GRAD_SYNC] = synced
        if (gathered := queued.get(ActionKind.PARAM_ALL_GATHER)) and spec.update_format is not None:
            coding_bytes[ActionKind.UPDATE] = optim * (_ENCODED_BYTES + _DECODED_BYTES)
            coding_bytes[ActionKind.PARAM_ALL_GATHER] = (params - optim) * _DECODED_BYTES
            seconds = coding_seconds(self.device, coding_bytes[ActionKind.PARAM_ALL_GATHER])
            reductions = gathered[0]._replace(use=StreamKind.REDUCE.value)
            decode = self._beside("decode", reductions, seconds)
            queued[ActionKind.PARAM_ALL_GATHER] = (*gathered, decode)
        return coding_bytes

    def _beside(self, name: str, other: QueuedJobs, seconds: float, *, at: int = 0) -> QueuedJobs:
        """Make work for the stream of a job of other work; on CPU ranks it takes processor time."""
        cpu = 1.0 if self.device.cores is not None else 0.0
        stream = other.phases[at][at].stream
        job = TimedJob(seconds + self.device.job_seconds, stream, cpu=cpu)
        return QueuedJobs(name, "reduce", other.use, ((job,),))


@dataclass(frozen=True, kw_only=True)
class ContextCosts:
    """The times of attention's passes for a micro-batch of a context-parallel group."""

    computing: ComputeTimes
    times: CollectiveTimes

    @cached_property
    def attention(self) -> AttentionSchedules:
        """The attention of the micro-batch that is computed."""
        return AttentionSchedules(self.computing.run)

    def program(self, action: Action, whole: ComputeOp, name: str) -> Program:
        """Yield the requests of an action.

        Attention, which may wait, comes before the other work in forward, after it in backward.
        """
        passes = self.passes(action)
        attention = (self._requests(*each, name, whole.kind) for each in passes)
        rest = (whole._replace(seconds=whole.seconds - sum(seconds for _, seconds in passes)),)
        parts = (rest, *attention) if action[0] is ActionKind.GRADIENTS else (*attention, rest)
        return chain.from_iterable(parts)

    def passes(self, action: Action) -> tuple[tuple[AttentionPass, float], ...]:
        """Return the attention passes of an action, each with its compute time."""
        kind, number, *_ = action
        passes = self.attention.passes(action)
        whole = self.computing.per_unit[number].get(kind, 0.0) if passes else 0.0
        forward, forwards = 0.0, sum(each.forward_equivalents for each in passes)
        if not whole:
            return ()
        if forwards:  # a share of backward is counted as before the first gradient
            forward = min(self.computing.attention_seconds(number), whole / forwards)
        return tuple((each, each.forward_equivalents * forward) for each in passes)

    def _requests(self, attn_pass: AttentionPass, seconds: float, unit: str, kind: str) -> Program:
        for request in self._schedules[attn_pass]:
            if isinstance(request, AttentionShare):
                yield ComputeOp(request.share * seconds, f"{kind} {unit}: attention", kind)
            else:
                yield request._replace(of=unit) if isinstance(request, QueueOp) else request

    @cached_property
    def _schedules(self) -> dict[AttentionPass, tuple[QueueOp | WaitOp | AttentionShare, ...]]:
        return {kind: tuple(self._timed(kind)) for kind in AttentionPass}

    def _timed(self, kind: AttentionPass) -> Iterator[QueueOp | WaitOp | AttentionShare]:
        for request in self.attention.schedule(kind):
            if isinstance(request, AttentionSend):
                phases = tuple(chain.from_iterable(map(self._phases, request.messages)))
                yield QueueOp(request.key, (QueuedJobs("attention", _CONTEXT, _CONTEXT, phases),))
                if not self.computing.run.overlaps:
                    yield WaitOp(request.key)
            else:
                yield request

    def _phases(self, message: AttentionMessage) -> tuple[ParallelJobs, ...]:
        to, span, num_bytes, number = message
        if isinstance(to, Op):
            return self.times.phases(to, span, num_bytes)
        time = self.times.exchange if to is Receivers.EACH else self.times.hop
        job = time(span, num_bytes)
        return ((job._replace(seconds=job.seconds * number),),) if number else ()

    @cached_property
    def loads(self) -> tuple[Mapping[Hashable, float], Mapping[Hashable, float]]:
        """The busy seconds of attention in a forward, and in a backward of a micro-batch.

        Keys are links (by name), comm streams, and the thread, which waits at least so long.
        """
        backward = self._load(ActionKind.RECOMPUTE, ActionKind.GRADIENTS)
        return self._load(ActionKind.FORWARD), backward

    def _load(self, *kinds: ActionKind) -> Mapping[Hashable, float]:
        actions = product(kinds, range(len(self.computing.per_unit)))
        busy: defaultdict[Hashable, float] = defaultdict(float)
        for (attn_pass, seconds), count in Counter(chain(*map(self.passes, actions))).items():
            requests = self._schedules[attn_pass]
            parts = (part for each in requests if isinstance(each, QueueOp) for part in each.parts)
            alone = GroupSpeed(num_groups=1), self._requests(attn_pass, seconds, "", "")
            exposed = Simulation([alone]).run() - seconds  # if nothing else is sent
            for load, took in {**busy_of(parts), THREAD: exposed}.items():
                busy[load] += count * took
        return busy
