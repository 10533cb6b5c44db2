"""Simulated training thread of sharding/sharded_model.py: units are prefetched, used and freed."""

from __future__ import annotations

from collections import deque

from paro.planning.machine.machine import GroupSpeed
from paro.planning.step.costs import StepCosts
from paro.planning.step.passes import MAX_WHOLE_GRADS
from paro.planning.step.simulation import Actor, Program, Simulation, Wait, Works
from paro.planning.step.thread import Buffer, StepThread


class _Node:
    """A unit module's state in a micro-batch."""

    def __init__(self, index: int, needed: list[Buffer]) -> None:
        self.index = index
        self.needed = needed
        self.held = False  # for backward


class GatheringThread(StepThread):
    """Gathers every unit before its use, and reduces its gradients while the next units run."""

    def __init__(
        self, costs: StepCosts, simulation: Simulation, actor: Actor, speed: GroupSpeed
    ) -> None:
        super().__init__(costs, simulation, actor, speed)
        self.units = costs.computing.units
        self.seconds = costs.computing.per_unit
        self.first = costs.computing.first_trained
        self.max_live = 1 + costs.prefetch_units
        self.max_whole_grads = MAX_WHOLE_GRADS if costs.overlaps else 1
        self.nodes = [
            _Node(index, [b for name in (unit.name, *unit.borrows) for b in self.buffers[name]])
            for index, unit in enumerate(self.units)
        ]
        self.recomputed = {group[-1]: group for group in costs.computing.recomputed_groups}
        self.upcoming: deque[_Node] = deque()
        self.live: list[_Node] = []
        self.reducing: deque[Buffer] = deque()
        back = [node for node in reversed(self.nodes[:-1]) if self._in_backward(node)]
        for _ in range(costs.num_micro_batches):
            self.upcoming.extend([*self.nodes, *back])

    def _micro_batch(self, *, last: bool) -> Program:
        yield from self._forward()
        yield from self._backward(last=last)

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
            yield from self._release_next(node)
            if self._in_backward(node) or node is self.nodes[-1]:
                node.held = True
                yield from self._require(node)
            else:
                yield from self._top_up()
            yield from self._recompute(node)
            name = self.units[node.index].name
            part = self.seconds[node.index]
            yield self._compute(part.until_first_gradient, f"backward {name}", "backward")
            trainable = [b for b in self.buffers[name] if b.costs.trainable]
            for buffer in trainable:
                yield from self._take_whole_grad(buffer)
            rest = part.rest_of_backward + self.costs.collect_seconds(
                self.units[node.index].trainable_numel
            )
            yield self._compute(rest, f"backward {name}", "backward")
            for buffer in trainable:
                yield from self._reduce(buffer, last=last)
        for node in self.nodes:
            if node.held:
                yield from self._release(node)

    def _recompute(self, node: _Node) -> Program:
        for index in self.recomputed.get(node.index, ()):
            other = self.nodes[index]
            yield from self._require(other)
            other.held = True
            seconds = self.seconds[other.index].recompute
            name = self.units[other.index].name
            yield self._compute(seconds, f"recompute {name}", "recompute")

    def _finish_gradients(self) -> Program:
        while self.reducing:
            yield Wait(self.reducing.popleft().read)
        yield from super()._finish_gradients()

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
            yield Wait(buffer.gathered or buffer.updated)
            buffer.gathered = buffer.updated = ()

    def _top_up(self) -> Program:
        while self.upcoming and len(self.live) < self.max_live:
            node = self.upcoming[0]
            if node in self.live or any(b.whole and b.costs.gather for b in node.needed):
                return
            yield from self._gather(self.upcoming.popleft())

    def _gather(self, node: _Node) -> Program:
        self.live.append(node)
        for buffer in node.needed:
            if not buffer.whole and buffer.costs.gather:
                buffer.whole = True
                name, phases = f"gather {buffer.name}", buffer.costs.gather
                buffer.gathered = self._queue("gather", "gather", name, phases, buffer.updated)
                yield from self._wait_unless_overlapped(buffer.gathered)

    def _release(self, node: _Node) -> Program:
        node.held = False
        self.live.remove(node)
        shared = {id(buffer) for other in self.live for buffer in other.needed}
        for buffer in node.needed:
            if id(buffer) not in shared:
                yield Wait(buffer.gathered)
                buffer.gathered, buffer.whole = (), False

    def _release_next(self, node: _Node) -> Program:
        if node.index + 1 < len(self.nodes):
            next_node = self.nodes[node.index + 1]
            if next_node.held:
                yield from self._release(next_node)
                yield from self._top_up()

    # Gradients #

    def _take_whole_grad(self, buffer: Buffer) -> Program:
        if not buffer.costs.reduce:
            return
        while buffer in self.reducing or len(self.reducing) >= self.max_whole_grads:
            yield Wait(self.reducing.popleft().read)
        self.reducing.append(buffer)

    def _reduce(self, buffer: Buffer, *, last: bool) -> Program:
        costs = buffer.costs
        works: Works = ()
        if costs.reduce:
            works = self._queue("reduce", "reduce", f"reduce {buffer.name}", costs.reduce)
            stream = costs.reduce[-1][-1].stream
            works = self._copy(f"add {buffer.name}", stream, costs.accumulated_bytes, works)
            buffer.read = works
            yield from self._wait_unless_overlapped(works)
        buffer.reduced = works
        if last:
            yield from self._reduce_for_step(buffer, works)
