"""Predicts the duration of a training step, by simulation, and a lower bound of it."""

# In: a step's schedule of actions with the compute time and the collectives of each, and a machine.
# Out: duration and exposed communication, or a lower bound of the duration; `Estimator` has both
# for each candidate of the planner. `simulate` runs one rank for each group of ranks with fast
# links, such as a node: its training thread, which computes, queues collectives and waits
# (`StepCosts.program`), its comm streams and its links, from the optimizer's update of one step to
# the all-reduce of the gradient norm of the next. With more than 4 micro-batches, steps with 2 and
# with 3 are simulated, and each further one costs their difference. By the lower bound the planner
# leaves out candidates without simulating them:
#
#     step >= max(time of the training thread, busy time of each link, of each comm stream)
#     step >= sum over forwards and backwards of
#             max(compute, busy time of each link and each comm stream by collectives that are
#                 queued and waited for within this forward or backward)
#
# where the first forward includes the update, and the last backward the end of the step.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from paro.layout import Unit
from paro.machine.collective_time import TimedJob, scalar_seconds
from paro.machine.machine import Device, GroupSpeed, Machine, Nic, Slowdown
from paro.planning.comm_costs import THREAD, CommCosts, ContextCosts
from paro.planning.computing import ComputeTimes, coding_seconds
from paro.planning.sending import muon_sent
from paro.planning.simulation import (
    ComputeOp,
    Program,
    QueuedJobs,
    QueueOp,
    Simulation,
    StreamActivity,
    WaitOp,
)
from paro.planning.step_counts import QUEUES, Counts, StepCounts
from paro.spec.muon_rounds import muon_rounds
from paro.spec.offload import NUM_SLOTS, offloaded
from paro.spec.run_spec import RunSpec
from paro.step.actions import OUTER_ROUND, PASS_OF, WAITED_BY, Action, ActionKind
from paro.topology import MOST_CTAS, PLANNED_WAITS

_MAX_SIMULATED = 4  # the most micro-batches that are all simulated
# Bytes a second to a GPU and from it at once where the machine file has no such rate: of PCIe 4,
# which two GPUs share.
_HOST_RATE = 12.5e9
# The most collectives at once that slow computing further. Each has MOST_CTAS thread blocks, as
# long as a GPU has so many multiprocessors for every communicator; one with fewer is overrated.
_MOST_COLLECTIVES = 8
# Collectives of an action (key) start after those of another action (value) on the same buffer.
AFTER = {ActionKind.GATHER: ActionKind.PARAM_ALL_GATHER, ActionKind.GRAD_SYNC: ActionKind.REDUCE}
_COMPUTES = {  # the kind of compute time of an action
    ActionKind.UPDATE: "update",
    ActionKind.FORWARD: "forward",
    ActionKind.LOSS: "forward",
    ActionKind.RECOMPUTE: "recompute",
    ActionKind.BACKWARD: "backward",
    ActionKind.GRADIENTS: "backward",
    ActionKind.REDUCE: "backward",  # collecting gradients of norms, where weights rotate
    ActionKind.SHIFT: "copy",
    ActionKind.SHIFT_BACK: "copy",
    ActionKind.SHIFT_GRADS: "copy",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The duration of a step, and how much of it is exposed communication."""

    seconds: float
    compute_seconds: float
    exposed: dict[str, float]  # seconds for which the slowest group waits, by `PLANNED_WAITS`
    activities: tuple[StreamActivity, ...] = ()


def simulate(costs: StepCosts, *, record: bool = False) -> Timeline:
    """Simulate one step; `record` returns activities of all streams, for every micro-batch."""
    run, count = costs.run, costs.run.num_micro_batches
    if count > _MAX_SIMULATED and not record:
        few = (replace(costs, run=replace(run, num_micro_batches=n)) for n in (2, 3))
        two, three = map(simulate, few)

        def extended(low: float, high: float) -> float:
            return high + (count - 3) * (high - low)

        exposed = {kind: extended(two.exposed[kind], three.exposed[kind]) for kind in PLANNED_WAITS}
        return Timeline(
            seconds=extended(two.seconds, three.seconds),
            compute_seconds=extended(two.compute_seconds, three.compute_seconds),
            exposed={kind: max(0.0, seconds) for kind, seconds in exposed.items()},
        )
    machine, curve = costs.machine, costs.device.slowed
    simulation = Simulation(
        ((speed, costs.program()) for speed in _speeds(machine)),
        record=record,
        launches_in_order=machine.launch_order == "implicit",
        slowed=_slowdowns(curve) if curve else (),
    )
    total = simulation.run()
    slowest = max(simulation.actors, key=lambda actor: sum(actor.computed.values()))
    return Timeline(
        seconds=total,
        compute_seconds=sum(slowest.computed.values()),
        exposed={kind: slowest.exposed.get(kind, 0.0) for kind in PLANNED_WAITS},
        activities=tuple(simulation.activities),
    )


def round_seconds(costs: StepCosts) -> float:
    """Simulate the longest round of outer steps (DiLoCo), which overlaps with no training."""
    return Simulation((speed, costs.round_program()) for speed in _speeds(costs.machine)).run()


def _speeds(machine: Machine) -> list[GroupSpeed]:
    """Return the different speeds of groups; one actor stands for all groups of a speed."""
    others = machine.num_groups - sum(part.num_groups for part in machine.uneven)
    return [*([GroupSpeed(num_groups=others)] if others else []), *machine.uneven]


def _slowdowns(curve: Slowdown) -> list[float]:
    """Compute the factors by which 0, 1, ... concurrent collectives slow down computing.

    The factor is linear between points of the curve, and constant beyond the last point.
    """
    points = [(0, 1.0), *sorted(curve)]

    def at(ctas: int) -> float:
        lines = (line for line in pairwise(points) if ctas <= line[1][0])
        (low, before), (high, after) = next(lines, (points[-1], points[-1]))
        return before + (after - before) * (ctas - low) / max(1, high - low)

    return [at(number * MOST_CTAS) for number in range(_MOST_COLLECTIVES + 1)]


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """The costs of a model's step under a strategy on a machine."""

    run: RunSpec
    computing: ComputeTimes
    comm_costs: CommCosts
    counts: StepCounts
    context: ContextCosts | None = None  # attention's costs; None without context parallelism

    @property
    def machine(self) -> Machine:
        return self.comm_costs.times.machine

    @property
    def device(self) -> Device:
        return self.computing.device

    def program(self) -> Program:
        """Yield the requests of a training thread for a step: compute, queue collectives, wait."""
        yield ComputeOp(self.device.step_seconds, "step", "other")
        yield ComputeOp(self.muon_seconds, "Newton-Schulz", "update")
        if self.host_seconds:
            yield ComputeOp(self.host_seconds, "optimizer states in host memory", "update")
        at_once, context = self.comm_costs.at_once, self.context
        for action in self.counts.schedule(self.run.num_micro_batches).actions():
            kind, number, *_ = action
            for cause in WAITED_BY.get(kind, ()):
                yield WaitOp((cause, number))
            if kind in QUEUES:
                buffer = self.counts.buffers[number]
                parts = self.comm_costs.of_buffers[number].queued.get(kind, ())
                yield QueueOp((kind, number), parts, buffer.name, (AFTER.get(kind), number))
                if kind in at_once:
                    yield WaitOp((kind, number))
            elif kind is ActionKind.NORM:
                jobs = (TimedJob(scalar_seconds(self.machine)),)
                norm = QueuedJobs("norm", "agree", "agree", (jobs,), joins=True)
                yield QueueOp(kind, (norm,))
                yield WaitOp(kind)
            if kind in _COMPUTES:
                unit, seconds = self.computed(action)
                whole = ComputeOp(seconds, f"{_COMPUTES[kind]} {unit.name}", _COMPUTES[kind])
                yield from context.program(action, whole, unit.name) if context else (whole,)

    def round_program(self) -> Program:
        """Yield the requests of a training thread for a round of the largest fragment."""
        outer, units = self.run.outer, self.counts.units
        assert outer is not None, "a run with outer steps"
        buffers, costs = self.counts.buffers, self.comm_costs.of_buffers
        fragments: defaultdict[int, list[int]] = defaultdict(list)
        for number, buffer in enumerate(buffers):
            if buffer.trains:
                fragments[outer.fragment_of(buffer.unit_index, len(units))].append(number)
        largest = max(fragments.values(), key=lambda ids: sum(buffers[n].layout.numel for n in ids))
        reduce, gather, spread = OUTER_ROUND
        for number in largest:
            for kind, after in ((reduce, None), (gather, (reduce, number))):
                parts = costs[number].queued.get(kind, ())
                yield QueueOp((kind, number), parts, buffers[number].name, after)
        for number in largest:
            yield WaitOp((gather, number))
            yield QueueOp((spread, number), costs[number].queued.get(spread, ()))
        yield from (WaitOp((spread, number)) for number in largest)

    def computed(self, action: Action) -> tuple[Unit, float]:
        """Return the unit that an action computes with, and the time it computes for."""
        kind, number, *slots = action
        shape, halves, seconds = self.counts.shape, None, 0.0
        # Duplicates `buffer_of`, since this method is called most of all.
        if kind >= ActionKind.FORWARD:
            halves = shape.halves(number)
        first = number if halves is None else halves[slots[0] if slots else 0][0]
        unit = self.counts.buffers[first].unit
        if halves is not None:
            share = 1 / (shape.num_slices * len(halves))
            seconds = self.computing.per_unit[number].get(kind, 0.0) * share
            if kind is ActionKind.GRADIENTS:
                seconds += self.collect_seconds(unit.trainable.numel) / shape.num_slices
        elif kind is ActionKind.UPDATE:
            encoded = self.comm_costs.of_buffers[number].coding_bytes.get(kind, 0)
            seconds = self.computing.update_seconds(self.run.strategy, unit.trainable.numel)
            seconds += coding_seconds(self.device, encoded)
        elif kind is ActionKind.REDUCE and unit.replicated:
            seconds = self.collect_seconds(unit.trainable.numel)
        elif kind in PASS_OF and slots[0] == slots[1]:  # in place: a copy out of the scratch
            (replaced,) = self.comm_costs.specs[number].collectives[PASS_OF[kind]]
            seconds = self.computing.memory_seconds(2 * replaced.num_bytes // shape.num_slices)
        return unit, seconds

    def collect_seconds(self, numel: int) -> float:
        return self.computing.collect_seconds(self.run.strategy, numel)

    @cached_property
    def muon_seconds(self) -> float:
        """The time of Newton-Schulz on the busiest ranks, or of its all-to-alls if that is longer.

        Without overlap it is the sum. All-to-alls send the mean number of bytes per rank.
        """
        run, specs = self.run, self.comm_costs.specs
        steps = run.muon.muon_num_ns_steps
        flops = sum(rounds.newton_schulz_flops(steps)[0] for rounds in muon_rounds(specs))
        computing = flops / self.device.sustained_flops
        sent = muon_sent(specs)
        machine = self.machine
        ranks_of_nic = machine.group_size if machine.nic is Nic.SHARED else 1
        links = ((machine.intra, sent.intra, 1), (machine.inter, sent.inter, ranks_of_nic))
        sending = sum(
            num_bytes * 8 / link.bits_per_second * ranks for link, num_bytes, ranks in links if link
        )
        return max(computing, sending) if run.overlaps else computing + sending

    @cached_property
    def host_seconds(self) -> float:
        """The time of copying optimizer states from host memory and back.

        Both directions overlap, but for the first states that come and the last that go. Without
        overlap, and in a CPU's memory, they take turns.
        """
        host, rate, ways = offloaded(self.comm_costs.specs), self.device.host_bytes_per_second, 2
        if self.machine.is_of_gpus:
            rate, ways = rate or _HOST_RATE, 1 if self.run.overlaps else 2
        alone = sum(host.slots) / NUM_SLOTS if ways == 1 else 0.0
        return (ways * host.host_bytes + alone) / (rate or self.device.memory_bytes_per_second / 2)

    # Lower bound #

    def least_seconds(self) -> float:
        """Compute a lower bound of the step's time, for any order of the actions."""
        update = self.computing.update_seconds(self.run.strategy, self.counts.num_trained)
        update += self.muon_seconds + self.host_seconds
        begin, end = map(self._exposed_at_least, self.counts.ends)
        first, forward, backward, last = self.counts.passes
        count = self.run.num_micro_batches
        passes = self._bound(first, forwards=1, more=begin + update)
        passes += self._bound(last, backwards=1, more=end)
        passes += (count - 1) * (
            self._bound(forward, forwards=1) + self._bound(backward, backwards=1)
        )
        step = self.counts.of_step(count)
        whole = self._bound(step, forwards=count, backwards=count, more=update)
        least = max(whole, passes) + self.device.step_seconds
        factors = (f for g in self.machine.uneven for f in (g.compute, g.intra, g.inter))
        return least / max([1.0, *factors]) + scalar_seconds(self.machine)

    def _bound(
        self, counts: Counts, *, forwards: int = 0, backwards: int = 0, more: float = 0.0
    ) -> float:
        """Bound from below the seconds of passes with the actions; `more`: of other work."""
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
        """Compute for how long actions keep busy each link, each comm stream and the thread."""
        busy: defaultdict[Hashable, float] = defaultdict(float)
        for action, count in counts.items():
            kind, number, *_ = action
            for load, seconds in self.comm_costs.of_buffers[number].busy.get(kind, {}).items():
                if load != THREAD or kind in self.comm_costs.at_once:
                    busy[load] += count * seconds
            if kind in PASS_OF:  # the thread copies received slices
                busy[THREAD] += count * self.computed(action)[1]
        return busy

    def _exposed_at_least(self, counts: Counts) -> float:
        """Compute a lower bound of the wait for collectives that overlap with no computation.

        Collectives of one buffer run one after the other.
        """
        of_buffer: defaultdict[int, float] = defaultdict(float)
        for (kind, number, *_), count in counts.items():
            if kind not in self.comm_costs.at_once:
                busy = self.comm_costs.of_buffers[number].busy.get(kind, {})
                of_buffer[number] += count * busy.get(THREAD, 0.0)
        return max(of_buffer.values(), default=0.0)
