"""Costs of one optimizer step: what each action computes and queues, and a lower bound."""

# A step takes no less than its training thread, and no less than any link or comm stream is busy;
# nor do its passes, one after the other. A forward or a backward ends no sooner than its compute,
# and no sooner than links and streams have finished what is both queued and waited for within it.
# The first forward begins with the update, so it has the updated parameters; the last backward ends
# with the step, with every reduction.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property

from paro.errors import UserError
from paro.optim.deal import newton_schulz_flops
from paro.optim.muon_config import MuonConfig
from paro.planning.cost_model import UnitSize, exchanged, muon_rounds
from paro.planning.machine.collective_time import scalar_seconds
from paro.planning.machine.machine import Device, Machine, Nic
from paro.planning.step.comm_costs import BufferCosts, CommCosts
from paro.planning.step.computing import Computing, coding_seconds
from paro.planning.step.context import ContextCosts
from paro.planning.step.passes import QUEUES, Counts, StepCounts
from paro.precision import BYTES_OF
from paro.step.actions import WAITED_BY, Move, Verb
from paro.step.plan import StepPlan

# What an action queues comes after what another has queued for the same buffer.
AFTER = {Verb.GATHER: Verb.GATHER_UPDATED, Verb.STEP_REDUCE: Verb.REDUCE}
_SHIFTS = (Verb.SHIFT, Verb.SHIFT_BACK, Verb.SHIFT_GRADS)


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """The costs of a model's step under a strategy on a machine."""

    computing: Computing
    comm_costs: CommCosts
    counts: StepCounts
    prefetch_units: int
    num_micro_batches: int
    context: ContextCosts | None = None  # None: no ranks share samples

    @property
    def plan(self) -> StepPlan:
        """The actions of the step."""
        return self.counts.plan(self.num_micro_batches)

    @property
    def machine(self) -> Machine:
        return self.comm_costs.machine

    @property
    def device(self) -> Device:
        return self.computing.device

    @property
    def overlaps(self) -> bool:
        """Whether anything travels while the thread computes."""
        return self.prefetch_units > 0

    def waits(self, verb: Verb) -> bool:
        """Whether what an action queues is waited for at once, and overlaps with nothing."""
        return not self.overlaps or (self.comm_costs.in_place and verb in _SHIFTS)

    def queued_by(self, number: int) -> BufferCosts:
        """What the actions on a buffer queue."""
        found = self._by_buffer.get(number)
        if found is None:
            unit, trains = self.counts.buffers[number]
            found = self._by_buffer[number] = self.comm_costs.of_buffer(unit, trains=trains)
        return found

    @cached_property
    def _by_buffer(self) -> dict[int, BufferCosts]:
        return {}

    # Compute #

    def computed(self, move: Move) -> tuple[UnitSize, float]:
        """For which unit the training thread computes for an action, and for how long."""
        verb, number, *slots = move
        if verb >= Verb.FORWARD:
            shape = self.counts.shape
            halves = shape.halves(number)
            unit, _ = self.counts.buffers[halves[slots[0] if slots else 0][0]]
            share = 1 / (shape.num_slices * len(halves))
            took = self.computing.per_unit[number].get(verb, 0.0) * share
            if verb is Verb.GRADIENTS:
                took += self.collect_seconds(unit.trainable_numel) / shape.num_slices
            return unit, took
        unit, trains = self.counts.buffers[number]
        took = 0.0
        if verb is Verb.UPDATE:
            encoded = self.queued_by(number).encoded_bytes
            took = self.update_seconds(unit.trainable_numel) + coding_seconds(self.device, encoded)
        elif verb is Verb.REDUCE and unit.replicated:
            took = self.collect_seconds(unit.trainable_numel)
        elif verb in _SHIFTS and slots[0] == slots[1]:  # in place, a copy out of staging
            precision = self.comm_costs.precision
            kind = precision.compute if trains else precision.frozen
            kind = precision.wire if verb is Verb.SHIFT_GRADS else kind
            numel = unit.trainable_numel if trains else unit.frozen_numel
            num_bytes = 2 * numel * BYTES_OF[kind] // self.counts.shape.num_slices
            took = self.computing.memory_seconds(num_bytes)
        return unit, took

    def collect_seconds(self, trainable_numel: int) -> float:
        return self.computing.collect_seconds(
            self.comm_costs.strategy, self.comm_costs.precision, trainable_numel
        )

    def update_seconds(self, trainable_numel: int) -> float:
        return self.computing.update_seconds(
            self.comm_costs.strategy, self.comm_costs.precision, trainable_numel
        )

    @cached_property
    def muon_seconds(self) -> float:
        """Newton-Schulz of the busiest ranks, round by round, while others' matrices travel.

        For the default number of its steps, and bytes as ranks send them on average.
        """
        comm = self.comm_costs
        if comm.precision.optimizer != "muon":
            return 0.0
        steps = MuonConfig().muon_num_ns_steps
        by_degree = muon_rounds(comm.units, comm.strategy)
        flops = sum(newton_schulz_flops(rounds, steps)[0] for rounds in by_degree.values())
        computing = flops / self.device.sustained_flops
        sent = exchanged(comm.units, comm.strategy, comm.topology, comm.precision)
        links = ((self.machine.intra, sent.intra), (self.machine.inter, sent.inter))
        ranks = self.machine.group_size if self.machine.nic is Nic.SHARED else 1
        moving = sum(
            num_bytes * 8 / link.bits_per_second * (ranks if link is self.machine.inter else 1)
            for link, num_bytes in links
            if link is not None
        )
        return max(computing, moving) if self.overlaps else computing + moving

    @property
    def coding_seconds(self) -> float:
        """A rank's time for codes in a step, wherever it is spent."""
        return coding_seconds(self.device, self.comm_costs.coding_bytes)

    @cached_property
    def _passes(self) -> tuple[float, float, float]:
        """Compute time of a forward, of a backward and of the update, without copies of slices."""
        trained, forward = self.counts.num_trained, self.computing.forward_seconds
        backward = self.computing.seconds - forward + self.collect_seconds(trained)
        return forward, backward, self.update_seconds(trained) + self.muon_seconds

    def compute_seconds(self) -> float:
        """Compute time of the training thread in a step."""
        forward, backward, update = self._passes
        copying = self._copy_seconds(self.counts.of_step(self.num_micro_batches))
        of_micro_batches = (forward + backward) * self.num_micro_batches
        return of_micro_batches + update + copying + self.device.step_seconds

    def _copy_seconds(self, counts: Counts) -> float:
        """Time to copy received slices."""
        return sum(n * self.computed(move)[1] for move, n in counts.items() if move[0] in _SHIFTS)

    # Lower bound #

    def least_seconds(self) -> float:
        """Lower bound of a step's time: no schedule beats its compute time or its link loads."""
        forward, backward, update = self._passes
        begin, end = map(self._exposed, self.counts.ends)
        first, then, back, last = self.counts.passes
        more = self.num_micro_batches - 1
        passes = self._least(begin + update + forward, first, forwards=1)
        passes += self._least(end + backward, last, backwards=1)
        passes += more * (
            self._least(forward, then, forwards=1) + self._least(backward, back, backwards=1)
        )
        count = self.num_micro_batches
        compute = (forward + backward) * count + update
        whole = self._least(compute, self.counts.of_step(count), forwards=count, backwards=count)
        least = max(whole, passes) + self.device.step_seconds
        fastest = max(
            (f for g in self.machine.uneven for f in (g.compute, g.intra, g.inter)), default=1.0
        )
        return least / max(1.0, fastest) + scalar_seconds(self.machine)

    def _least(
        self, compute: float, counts: Counts, *, forwards: int = 0, backwards: int = 0
    ) -> float:
        """The least seconds of a thread that computes for so long, and of what it queues.

        Attention of so many forwards and backwards is among it.
        """
        thread, busy = compute + self._copy_seconds(counts), self.busy(counts)
        attention = () if self.context is None else self.context.loads
        for of_pass, number in zip(attention, (forwards, backwards), strict=False):
            thread += number * of_pass.exposed
            for load, seconds in of_pass.busy.items():
                busy[load] = busy.get(load, 0.0) + number * seconds
        for (verb, number, *_), count in counts.items():
            if self.waits(verb):
                thread += count * self.queued_by(number).seconds.get(verb, 0.0)
        return max((thread, *busy.values()))

    def busy(self, counts: Counts) -> dict[Hashable, float]:
        """Seconds for which what is counted keeps links, by name, and comm streams busy."""
        found: defaultdict[Hashable, float] = defaultdict(float)
        for (verb, number, *_), count in counts.items():
            for load, seconds in self.queued_by(number).busy.get(verb, {}).items():
                found[load] += count * seconds
        return found

    def _exposed(self, moves: Iterable[Move]) -> float:
        """For how long the thread waits, at least, for what overlaps among these actions."""
        now = waited = 0.0
        ready: dict[tuple[Verb | None, int], float] = {}
        for move in moves:
            verb, number, *_ = move
            for cause in WAITED_BY.get(verb, ()):
                late = ready.pop((cause, number), now) - now
                waited, now = waited + max(0.0, late), now + max(0.0, late)
            if verb in QUEUES:
                seconds = self.queued_by(number).seconds.get(verb, 0.0)
                after = max(now, ready.get((AFTER.get(verb), number), now))
                ready[verb, number] = after + seconds
                now += seconds if self.waits(verb) else 0.0
            now += self.computed(move)[1]
            if self.context is not None:
                now += self.context.exposed(move)
        return waited


def device_of(machine: Machine) -> Device:
    """The device of a machine; `UserError` if its file has none."""
    if machine.device is None:
        raise UserError(
            f"machine {machine.name}: device is missing, which planning needs: add an object with "
            "name, memory_bytes, reserved_bytes, peak_flops, sustained_flops and "
            "memory_bytes_per_second"
        )
    return machine.device
