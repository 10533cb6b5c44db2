"""Communication costs of a strategy on a machine: what each action queues in comm streams."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from paro.planning.cost_model import (
    Buffer,
    Collective,
    UnitSize,
    strategy_of,
    unit_collectives,
)
from paro.planning.machine.collective_time import CollectiveTimes, TimedJob
from paro.planning.machine.machine import Device
from paro.planning.passes import QUEUES, StepCounts
from paro.planning.run_plan import RunPlan
from paro.planning.step.computing import coding_seconds, device_of
from paro.planning.step.simulation import Queued
from paro.precision import BYTES_OF
from paro.step.actions import PASS_OF, Verb

# Memory traffic of an element's codes, counted in paro/quantization/blocks.py: what every operation
# reads and writes.
_ENCODED_BYTES = 70
_DECODED_BYTES = 40
_TRANSFORM_BYTES = 60
CODING_BYTES = _ENCODED_BYTES + _DECODED_BYTES + _TRANSFORM_BYTES
# Reads the error and the codes, encodes the new error; three operations on fp32 values.
_FEEDBACK_BYTES = 2 * _DECODED_BYTES + _ENCODED_BYTES + 3 * 12

# Of what an action queues: the kind of exposed time, and the use of the comm streams.
_KINDS = {
    Verb.GATHER: ("gather", "gather"),
    Verb.REDUCE: ("reduce", "reduce"),
    Verb.STEP_REDUCE: ("finish", "reduce"),
    Verb.GATHER_UPDATED: ("publish", "gather"),
    Verb.SHIFT: ("gather", "rotate"),
    Verb.SHIFT_BACK: ("gather", "rotate"),
    Verb.SHIFT_GRADS: ("reduce", "rotate"),
}
THREAD = "thread"  # the training thread, beside links and comm streams


def busy_of(work: Iterable[Queued]) -> Mapping[Hashable, float]:
    """Seconds for which work keeps links, by name, comm streams and a thread that waits busy."""
    busy: defaultdict[Hashable, float] = defaultdict(float)
    for use, phase in ((one.use, phase) for one in work for phase in one.phases):
        for job in phase:
            busy["intra"] += job.seconds * job.intra
            busy["inter"] += job.seconds * job.inter
            busy[use, job.stream] += job.seconds
        busy[THREAD] += max(job.seconds for job in phase)
    return busy


@dataclass(frozen=True, kw_only=True)
class BufferCosts:
    """What the actions on one of a unit's flat buffers queue, one after the other."""

    queued: Mapping[Verb, tuple[Queued, ...]]
    encoded_bytes: int = 0  # read and written to encode updated parameters and decode them
    coding_bytes: int = 0  # the same of all codes, wherever they are made

    @cached_property
    def busy(self) -> Mapping[Verb, Mapping[Hashable, float]]:
        """What every action keeps busy; see `busy_of`."""
        return {verb: busy_of(work) for verb, work in self.queued.items()}


@dataclass(frozen=True, kw_only=True)
class CommCosts:
    """All collectives of a run's units, whatever its micro-batches."""

    run: RunPlan
    counts: StepCounts
    times: CollectiveTimes

    @cached_property
    def at_once(self) -> frozenset[Verb]:
        """The actions that are waited for where they queue something: it overlaps with nothing."""
        if not self.run.overlaps:
            return QUEUES
        return frozenset(PASS_OF) if self.run.materialize.in_place else frozenset()

    @property
    def device(self) -> Device:
        return device_of(self.times.machine)

    @cached_property
    def of_buffers(self) -> list[BufferCosts]:
        """The costs of every buffer; those of equal kind have equal costs."""
        alike, buffers = self.counts.alike, self.counts.buffers
        known = {first: self._of_kind(buffers[first]) for first in dict.fromkeys(alike)}
        return [known[first] for first in alike]

    @cached_property
    def coding_bytes(self) -> int:
        """Memory traffic of all codes of a step; 0 if none are sent."""
        return sum(costs.coding_bytes for costs in self.of_buffers)

    def _of_kind(self, buffer: Buffer) -> BufferCosts:
        run, (unit, trains, _) = self.run, buffer
        sent = unit_collectives(unit, run.strategy, run.topology, run.precision)
        own = {verb: found for (verb, of), found in sent.items() if of is trains}
        queued = dict(self._queued(own))
        return self._with_copies(unit, own, queued) if trains else BufferCosts(queued=queued)

    def _queued(
        self, sent: dict[Verb, tuple[Collective, ...]]
    ) -> Iterator[tuple[Verb, tuple[Queued, ...]]]:
        """What the actions queue that send these collectives."""
        for verb, collectives in sent.items():
            if self.run.materialize.rotates and verb in PASS_OF.values():
                (one,) = collectives
                in_place = self.run.materialize.in_place
                shifts = self.times.shifts(one.span, one.num_bytes, in_place=in_place)
                found = [(shift, shifts[:1]) for shift, of in PASS_OF.items() if of is verb]
            else:
                of_each = (self.times.phases(o.op, o.span, o.num_bytes) for o in collectives)
                found = [(verb, tuple(phase for phases in of_each for phase in phases))]
            for own, phases in found:
                kind, use = _KINDS[own]
                # On CPU ranks messages of weights and of gradients do not wait for each other.
                if own is Verb.SHIFT_GRADS and self.device.cores is not None:
                    use = "gradients"
                if phases:
                    yield own, (Queued(kind, kind, use, phases),)

    def _with_copies(
        self,
        unit: UnitSize,
        sent: dict[Verb, tuple[Collective, ...]],
        queued: dict[Verb, tuple[Queued, ...]],
    ) -> BufferCosts:
        """Costs of a trainable buffer: its collectives, and what is copied beside them."""
        precision, strategy = self.run.precision, strategy_of(unit, self.run.strategy)
        params, grads, optim = (unit.trainable_numel // degree for degree in strategy.degrees)
        wire, accumulate = BYTES_OF[precision.wire], BYTES_OF[precision.accumulate]
        summed, (updated,) = sent[Verb.STEP_REDUCE], sent[Verb.GATHER_UPDATED]
        reduced, gathered = queued.get(Verb.REDUCE), queued.get(Verb.GATHER_UPDATED)
        copy_rate = self.device.memory_bytes_per_second
        coded = encoded = decoded = 0
        if reduced:
            added = grads * (wire + 2 * accumulate) / copy_rate
            queued[Verb.REDUCE] = (*reduced, self._beside("add", reduced[-1].phases[-1][-1], added))
        if finished := queued.get(Verb.STEP_REDUCE):
            first = finished[0].phases[0][0]
            if summed[-1].is_coded:
                feedback = _FEEDBACK_BYTES if precision.inter_grad_error_feedback else 0
                outside = summed[1].span[0].inner
                coded = unit.trainable_numel // outside * (CODING_BYTES + feedback)
                code = self._beside("code", first, coding_seconds(self.device, coded))
                finished = (code, *finished)
            if wire != accumulate:  # before and after
                converted = (grads + optim) * unit.dealt * (wire + accumulate) / copy_rate
                finished = (self._beside("convert", first, converted), *finished)
            queued[Verb.STEP_REDUCE] = finished
        if gathered and updated.is_coded:
            encoded = optim * (_ENCODED_BYTES + _DECODED_BYTES)
            decoded = (params - optim) * _DECODED_BYTES
            seconds = coding_seconds(self.device, decoded)
            code = self._beside("decode", gathered[0].phases[0][0], seconds)
            queued[Verb.GATHER_UPDATED] = (*gathered, code)
        coding = encoded + decoded + coded
        return BufferCosts(queued=queued, encoded_bytes=encoded, coding_bytes=coding)

    def _beside(self, name: str, other: TimedJob, seconds: float) -> Queued:
        """Work in the stream of another job; on CPU ranks it takes processor time."""
        cpu = 1.0 if self.device.cores is not None else 0.0
        seconds += self.device.job_seconds
        job = TimedJob(stream=other.stream, seconds=seconds, intra=0.0, inter=0.0, cpu=cpu)
        return Queued(name, "reduce", "reduce", ((job,),))
