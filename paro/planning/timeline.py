"""One optimizer step in time: the engine's own order of things on streams that run side by side."""

# The program is that of sharding/engine.py and optim/optimizer.py, from one moment at which all
# lanes are empty to the next: the gradients are there, their norm is known. So it begins with the
# update, unit by unit, each queueing its publishing; then the micro-batches, the first of which
# waits for what was published; then the wait for the last reductions and the agreement on the norm.
#
# Micro-batches in the middle are alike: of more than four, three are simulated and the others take
# what the third adds.

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from paro.planning.collective_time import Job, Lane, Phase, scalar_seconds
from paro.planning.machine import GroupSpeed
from paro.planning.moves import Moving
from paro.planning.simulation import Actor, Compute, Program, Simulation, Span, Wait, Work
from paro.planning.step_costs import StepCosts

_MOST_SIMULATED = 4
EXPOSED = ("gather", "reduce", "finish", "publish", "agree")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """How long a step takes, and what of it is not computing."""

    seconds: float
    compute_seconds: float
    exposed: dict[str, float]  # seconds in which the slowest group waits, by what for
    spans: tuple[Span, ...] = ()

    @property
    def exposed_seconds(self) -> float:
        return sum(self.exposed.values())


def simulate(costs: StepCosts, *, record: bool = False) -> Timeline:
    """One step; `record` keeps what every stream did, micro-batch by micro-batch."""
    count = costs.num_micro_batches
    if record or count <= _MOST_SIMULATED:
        return _simulate(costs, record=record)
    shorter = _simulate(replace(costs, num_micro_batches=2), record=False)
    longer = _simulate(replace(costs, num_micro_batches=3), record=False)
    more = count - 3

    def extended(low: float, high: float) -> float:
        return high + more * (high - low)

    return Timeline(
        seconds=extended(shorter.seconds, longer.seconds),
        compute_seconds=extended(shorter.compute_seconds, longer.compute_seconds),
        exposed={
            kind: max(0.0, extended(shorter.exposed[kind], longer.exposed[kind]))
            for kind in longer.exposed
        },
    )


def _simulate(costs: StepCosts, *, record: bool) -> Timeline:
    speeds = _speeds(costs)
    simulation = Simulation(len(speeds), record=record)
    programs = [
        _Thread(costs, simulation, actor, speed).program()
        for actor, speed in zip(simulation.actors, speeds, strict=True)
    ]
    total = simulation.run(programs)
    slowest = max(simulation.actors, key=lambda actor: sum(actor.computed.values()))
    return Timeline(
        seconds=total,
        compute_seconds=sum(slowest.computed.values()),
        exposed={kind: slowest.exposed.get(kind, 0.0) for kind in EXPOSED},
        spans=tuple(simulation.spans),
    )


def _speeds(costs: StepCosts) -> list[GroupSpeed]:
    """One actor stands for all groups that are alike."""
    machine = costs.machine
    others = machine.num_groups - sum(part.num_groups for part in machine.uneven)
    usual = [GroupSpeed(num_groups=others)] if others else []
    return [*usual, *machine.uneven]


class _Node:
    """A unit as the engine sees it in a micro-batch."""

    def __init__(self, index: int, needed: list[_Buffer]) -> None:
        self.index = index
        self.needed = needed
        self.held = False  # for backward


class _Buffer:
    """A flat buffer: what of it is under way."""

    def __init__(self, unit: str, moving: Moving) -> None:
        self.name = unit if moving.trainable else f"{unit} (frozen)"
        self.moving = moving
        self.whole = False
        self.gathered: tuple[Work, ...] = ()
        self.published: tuple[Work, ...] = ()
        self.read: tuple[Work, ...] = ()  # the whole gradient has been
        self.reduced: tuple[Work, ...] = ()


class _Thread:
    """The training thread of a group's ranks."""

    def __init__(
        self, costs: StepCosts, simulation: Simulation, actor: Actor, speed: GroupSpeed
    ) -> None:
        self.costs = costs
        self.units = costs.computing.units
        self.seconds = costs.computing.of_units
        self.first = costs.computing.first_trained
        self.simulation = simulation
        self.actor = actor
        self.speed = speed
        self.overlaps = costs.overlaps
        ahead = costs.prefetch_units if self.overlaps.gathers else 0
        self.max_live = 1 + ahead
        self.max_whole_grads = 2 if self.overlaps.reductions else 1
        self.number = 0
        self.buffers = {
            unit.name: [_Buffer(unit.name, moving) for moving in parts]
            for unit, parts in zip(self.units, costs.moves.of_units, strict=True)
        }
        self.nodes = [
            _Node(index, [b for name in (unit.name, *unit.borrows) for b in self.buffers[name]])
            for index, unit in enumerate(self.units)
        ]
        self.upcoming: deque[_Node] = deque()
        self.live: list[_Node] = []
        self.reducing: deque[_Buffer] = deque()

    # The step #

    def program(self) -> Program:
        costs = self.costs
        yield self._compute(costs.device.step_seconds, "step", "other")
        yield from self._update()
        back = [node for node in reversed(self.nodes[:-1]) if self._in_backward(node)]
        for _ in range(costs.num_micro_batches):
            self.upcoming.extend([*self.nodes, *back])
        for index in range(costs.num_micro_batches):
            yield from self._forward()
            yield from self._backward(last=index + 1 == costs.num_micro_batches)
        yield from self._finish_gradients()

    def _update(self) -> Program:
        for unit in self.units:
            seconds = self.costs.updating(unit.trainable_numel)
            yield self._compute(seconds, f"update {unit.name}", "update")
            for buffer in self.buffers[unit.name]:
                if buffer.moving.publish:
                    buffer.published = self._move(
                        "gather", "publish", buffer.name, buffer.moving.publish, ()
                    )
                    if not self.overlaps.publishing:
                        yield Wait(buffer.published)

    def _forward(self) -> Program:
        last = self.nodes[-1]
        for node in self.nodes:
            yield from self._require(node)
            name = self.units[node.index].name
            seconds = self.seconds[node.index].forward
            yield self._compute(seconds, f"forward {name}", "forward")
            if node is last and self.first < len(self.nodes):
                node.held = True
            else:
                yield from self._release(node)

    def _backward(self, *, last: bool) -> Program:
        for node in reversed(self.nodes[self.first :]):
            yield from self._release_following(node)
            if self._in_backward(node) or node is self.nodes[-1]:
                node.held = True
                yield from self._require(node)
            else:
                yield from self._top_up()
            yield from self._recompute(node)
            name = self.units[node.index].name
            part = self.seconds[node.index]
            yield self._compute(part.until_first_gradient, f"backward {name}", "backward")
            trainable = [b for b in self.buffers[name] if b.moving.trainable]
            for buffer in trainable:
                yield from self._take_whole_grad(buffer)
            rest = part.rest_of_backward + self.costs.taking(self.units[node.index].trainable_numel)
            yield self._compute(rest, f"backward {name}", "backward")
            for buffer in trainable:
                yield from self._reduce(buffer, last=last)
        for node in self.nodes:
            if node.held:
                yield from self._release(node)

    def _recompute(self, node: _Node) -> Program:
        start = self.costs.computing.recomputed_from[node.index]
        if start is None:
            return
        for other in self.nodes[start : node.index + 1]:
            yield from self._require(other)
            other.held = True
            seconds = self.seconds[other.index].recompute
            name = self.units[other.index].name
            yield self._compute(seconds, f"recompute {name}", "recompute")

    def _finish_gradients(self) -> Program:
        while self.reducing:
            yield Wait(self.reducing.popleft().read)
        for buffers in self.buffers.values():
            for buffer in buffers:
                yield Wait(buffer.reduced)
                buffer.reduced = ()
        seconds = scalar_seconds(self.costs.machine)
        job = Job(lane=(), seconds=seconds, intra=0.0, inter=0.0, cpu=0.0)
        yield Wait(self._queue("agree", "agree", "norm", (job,), (), joins=True))

    # Parameters #

    def _in_backward(self, node: _Node) -> bool:
        last = node is self.nodes[-1]
        return node.index >= self.first and (self.units[node.index].gathered_for_backward or last)

    def _require(self, node: _Node) -> Program:
        if node not in self.live:
            self.upcoming.remove(node)
            yield from self._gather(node)
        yield from self._top_up()
        for buffer in node.needed:
            yield Wait(buffer.gathered or buffer.published)
            buffer.gathered = buffer.published = ()

    def _top_up(self) -> Program:
        while self.upcoming and len(self.live) < self.max_live:
            node = self.upcoming[0]
            if node in self.live or any(b.whole and b.moving.gather for b in node.needed):
                return
            yield from self._gather(self.upcoming.popleft())

    def _gather(self, node: _Node) -> Program:
        self.live.append(node)
        for buffer in node.needed:
            if not buffer.whole and buffer.moving.gather:
                buffer.whole = True
                moving, published = buffer.moving, buffer.published
                buffer.gathered = self._move(
                    "gather", "gather", buffer.name, moving.gather, published
                )
                if not self.overlaps.gathers:
                    yield Wait(buffer.gathered)

    def _release(self, node: _Node) -> Program:
        node.held = False
        self.live.remove(node)
        shared = {id(buffer) for other in self.live for buffer in other.needed}
        for buffer in node.needed:
            if id(buffer) not in shared:
                yield Wait(buffer.gathered)
                buffer.gathered, buffer.whole = (), False

    def _release_following(self, node: _Node) -> Program:
        if node.index + 1 < len(self.nodes):
            following = self.nodes[node.index + 1]
            if following.held:
                yield from self._release(following)
                yield from self._top_up()

    # Gradients #

    def _take_whole_grad(self, buffer: _Buffer) -> Program:
        if not buffer.moving.reduce:
            return
        while buffer in self.reducing or len(self.reducing) >= self.max_whole_grads:
            yield Wait(self.reducing.popleft().read)
        self.reducing.append(buffer)

    def _reduce(self, buffer: _Buffer, *, last: bool) -> Program:
        moving = buffer.moving
        event: tuple[Work, ...] = ()
        if moving.reduce:
            event = self._move("reduce", "reduce", buffer.name, moving.reduce, ())
            lane = moving.reduce[-1][-1].lane
            event = self._copy(f"add {buffer.name}", lane, moving.accumulated_bytes, event)
            buffer.read = event
            if not self.overlaps.reductions:
                yield Wait(event)
        if last:
            if moving.converted_bytes:
                lane = (moving.finish or moving.replicas)[0][0].lane
                event = self._copy(f"convert {buffer.name}", lane, moving.converted_bytes, event)
            for phases in (moving.finish, moving.replicas):
                event = self._move("reduce", "finish", buffer.name, phases, event)
            if not self.overlaps.finishing:
                yield Wait(event)
        buffer.reduced = event

    # Work #

    def _compute(self, seconds: float, name: str, kind: str) -> Compute:
        return Compute(seconds / self.speed.compute, name, kind)

    def _copy(
        self, name: str, lane: Lane, num_bytes: int, after: tuple[Work, ...]
    ) -> tuple[Work, ...]:
        """Reading and writing in a reduction's lane; on CPU ranks it takes the processor."""
        busy = 1.0 if self.costs.device.cores is not None else 0.0
        seconds = self.costs.computing.memory_seconds(num_bytes)
        job = Job(lane=lane, seconds=seconds, intra=0.0, inter=0.0, cpu=busy)
        return self._queue("reduce", "reduce", name, (job,), after)

    def _move(
        self,
        use: str,
        kind: str,
        name: str,
        phases: tuple[Phase, ...],
        after: tuple[Work, ...],
    ) -> tuple[Work, ...]:
        for phase in phases:
            after = self._queue(use, kind, f"{kind} {name}", phase, after)
        return after

    def _queue(
        self,
        use: str,
        kind: str,
        name: str,
        phase: Phase,
        after: tuple[Work, ...],
        *,
        joins: bool = False,
    ) -> tuple[Work, ...]:
        return tuple(self._works(use, kind, name, phase, (after, joins)))

    def _works(
        self,
        use: str,
        kind: str,
        name: str,
        phase: Phase,
        how: tuple[tuple[Work, ...], bool],
    ) -> Iterator[Work]:
        after, joins = how
        crosses = joins or any(job.inter for job in phase)
        for job in phase:
            self.number += 1
            speed = self.speed.inter if job.inter else self.speed.intra if job.intra else 1.0
            work = Work(
                name=name,
                kind=kind,
                job=job,
                lane=(use, job.lane),
                members=len(self.simulation.actors) if crosses else 1,
                after=after,
                left=job.seconds / speed,
            )
            yield self.simulation.submit(self.actor, work, self.number)
