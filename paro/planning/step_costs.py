"""Costs of one optimizer step: what each action computes and queues, and a lower bound."""

# A step takes no less than its training thread, and no less than any link or comm stream is busy;
# nor do its passes, one after the other. A forward or a backward ends no sooner than its compute,
# and no sooner than links and streams have finished what is both queued and waited for within it.
# The first forward begins with the update, so it has the updated parameters; the last backward ends
# with the step, with every reduction.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

from paro.layout import Unit
from paro.machine.collective_time import TimedJob, scalar_seconds
from paro.machine.machine import Device, Machine, Nic
from paro.planning.comm_costs import THREAD, CommCosts
from paro.planning.computing import Computing, coding_seconds
from paro.planning.context_costs import ContextCosts
from paro.planning.passes import QUEUES, Counts, StepCounts
from paro.planning.sending import exchanged
from paro.planning.simulation import Compute, Program, Queue, Queued, Wait
from paro.spec.muon_rounds import muon_rounds
from paro.spec.run_spec import RunSpec
from paro.step.actions import PASS_OF, WAITED_BY, Move, Verb

# What an action queues comes after what another has queued for the same buffer.
AFTER = {Verb.GATHER: Verb.PARAM_ALL_GATHER, Verb.GRAD_SYNC: Verb.REDUCE}
_COMPUTES = {  # the kind of time
    Verb.UPDATE: "update",
    Verb.FORWARD: "forward",
    Verb.LOSS: "forward",
    Verb.RECOMPUTE: "recompute",
    Verb.BACKWARD: "backward",
    Verb.GRADIENTS: "backward",
    Verb.REDUCE: "backward",  # of norms, where weights rotate
    Verb.SHIFT: "copy",
    Verb.SHIFT_BACK: "copy",
    Verb.SHIFT_GRADS: "copy",
}


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """The costs of a model's step under a strategy on a machine."""

    computing: Computing
    comm_costs: CommCosts
    counts: StepCounts
    num_micro_batches: int
    context: ContextCosts | None = None  # None: without context parallelism

    @property
    def run(self) -> RunSpec:
        return self.comm_costs.run

    @property
    def machine(self) -> Machine:
        return self.comm_costs.times.machine

    @property
    def device(self) -> Device:
        return self.computing.device

    # Compute #

    def computed(self, move: Move) -> tuple[Unit, float]:
        """For which unit the training thread computes for an action, and for how long."""
        verb, number, *slots = move
        num_slices, halves = self.counts.shape.num_slices, None
        if verb >= Verb.FORWARD:  # as in `buffer_of`, but this is called most of all
            halves = self.counts.shape.halves(number)
        first = number if halves is None else halves[slots[0] if slots else 0][0]
        unit, took = self.counts.buffers[first].unit, 0.0
        if halves is not None:
            share = 1 / (num_slices * len(halves))
            took = self.computing.per_unit[number].get(verb, 0.0) * share
            if verb is Verb.GRADIENTS:
                took += self.collect_seconds(unit.trainable_numel) / num_slices
        elif verb is Verb.UPDATE:
            encoded = self.comm_costs.of_buffers[number].codes.get(verb, 0)
            took = self.update_seconds(unit.trainable_numel) + coding_seconds(self.device, encoded)
        elif verb is Verb.REDUCE and unit.replicated:
            took = self.collect_seconds(unit.trainable_numel)
        elif verb in PASS_OF and slots[0] == slots[1]:  # in place, a copy out of staging
            (one,) = self.comm_costs.specs[number].collectives[PASS_OF[verb]]
            took = self.computing.memory_seconds(2 * one.num_bytes // num_slices)
        return unit, took

    def collect_seconds(self, numel: int) -> float:
        return self.computing.collect_seconds(self.run.strategy, self.run.precision, numel)

    def update_seconds(self, numel: int) -> float:
        return self.computing.update_seconds(self.run.strategy, self.run.precision, numel)

    @cached_property
    def muon_seconds(self) -> float:
        """Newton-Schulz of the busiest ranks, round by round, while others' matrices travel.

        For bytes as ranks send them on average.
        """
        run, specs = self.run, self.comm_costs.specs
        steps = run.muon.muon_num_ns_steps
        flops = sum(rounds.newton_schulz_flops(steps)[0] for rounds in muon_rounds(specs))
        computing = flops / self.device.sustained_flops
        sent = exchanged(specs)
        machine = self.machine
        sharing = machine.group_size if machine.nic is Nic.SHARED else 1
        links = ((machine.intra, sent.intra, 1), (machine.inter, sent.inter, sharing))
        moving = sum(
            num_bytes * 8 / link.bits_per_second * ranks for link, num_bytes, ranks in links if link
        )
        return max(computing, moving) if run.overlaps else computing + moving

    # What the training thread does #

    def program(self) -> Program:
        """What the training thread of a group's ranks does in a step."""
        yield Compute(self.device.step_seconds, "step", "other")
        yield Compute(self.muon_seconds, "Newton-Schulz", "update")
        at_once, context = self.comm_costs.at_once, self.context
        for move in self.counts.schedule(self.num_micro_batches).actions():
            verb, number, *_ = move
            for cause in WAITED_BY.get(verb, ()):
                yield Wait((cause, number))
            if verb in QUEUES:
                buffer = self.counts.buffers[number]
                parts = self.comm_costs.of_buffers[number].queued.get(verb, ())
                yield Queue((verb, number), parts, buffer.name, (AFTER.get(verb), number))
                if verb in at_once:
                    yield Wait((verb, number))
            elif verb is Verb.NORM:
                seconds = scalar_seconds(self.machine)
                job = TimedJob(stream=(), seconds=seconds, intra=0.0, inter=0.0, cpu=0.0)
                norm = Queued("norm", "agree", "agree", ((job,),), joins=True)
                yield Queue(verb, (norm,))
                yield Wait(verb)
            if verb in _COMPUTES:
                unit, seconds = self.computed(move)
                whole = Compute(seconds, f"{_COMPUTES[verb]} {unit.name}", _COMPUTES[verb])
                yield from context.program(move, whole, unit.name) if context else (whole,)

    # Lower bound #

    def least_seconds(self) -> float:
        """Return the lower bound of a step's time: no schedule beats its compute time or its link
        loads."""
        update = self.update_seconds(self.counts.num_trained) + self.muon_seconds
        begin, end = map(self._exposed, self.counts.ends)
        first, then, back, last = self.counts.passes
        count = self.num_micro_batches
        passes = self._least(first, forwards=1, more=begin + update)
        passes += self._least(last, backwards=1, more=end)
        passes += (count - 1) * (self._least(then, forwards=1) + self._least(back, backwards=1))
        step = self.counts.of_step(count)
        whole = self._least(step, forwards=count, backwards=count, more=update)
        least = max(whole, passes) + self.device.step_seconds
        factors = (f for g in self.machine.uneven for f in (g.compute, g.intra, g.inter))
        return least / max([1.0, *factors]) + scalar_seconds(self.machine)

    def _least(
        self, counts: Counts, *, forwards: int = 0, backwards: int = 0, more: float = 0.0
    ) -> float:
        """Return the least seconds of so many passes that queue this; the thread takes
        some `more`."""
        busy = self.busy(counts)
        forward, collecting = self.computing.forward_seconds, self.counts.num_trained
        backward = self.computing.seconds - forward + self.collect_seconds(collecting)
        busy[THREAD] += forwards * forward + backwards * backward + more
        attention = () if self.context is None else self.context.loads
        for of_pass, number in zip(attention, (forwards, backwards), strict=False):
            for load, seconds in of_pass.items():
                busy[load] += number * seconds
        return max(busy.values())

    def busy(self, counts: Counts) -> defaultdict[Hashable, float]:
        """Return seconds for which what is counted keeps links and comm streams busy, and the
        thread."""
        found: defaultdict[Hashable, float] = defaultdict(float)
        for move, count in counts.items():
            verb, number, *_ = move
            for load, seconds in self.comm_costs.of_buffers[number].busy.get(verb, {}).items():
                if load != THREAD or verb in self.comm_costs.at_once:
                    found[load] += count * seconds
            if verb in PASS_OF:  # copies what it has received
                found[THREAD] += count * self.computed(move)[1]
        return found

    def _exposed(self, counts: Counts) -> float:
        """For how long the thread waits, at least, for what may overlap and has nothing to.

        What is queued for one buffer comes one after the other.
        """
        of_buffer: defaultdict[int, float] = defaultdict(float)
        for (verb, number, *_), count in counts.items():
            if verb not in self.comm_costs.at_once:
                busy = self.comm_costs.of_buffers[number].busy.get(verb, {})
                of_buffer[number] += count * busy.get(THREAD, 0.0)
        return max(of_buffer.values(), default=0.0)
