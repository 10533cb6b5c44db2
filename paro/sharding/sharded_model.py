"""Runs a model made of sharded units: gathers ahead, releases behind, reduces under backward."""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paro.distributed.timers import Timers
from paro.sharding.sharded_unit import ShardedUnit, UnitState
from paro.sharding.wrap import Node


class Phase(Enum):
    """What the training thread is doing to the model."""

    IDLE = 0
    EVALUATION = 1
    FORWARD = 2
    BACKWARD = 3


class ShardedModel:
    """A model whose nodes are whole only while they run.

    In a step the nodes run in an order known beforehand: all forward, then back, for every
    micro-batch. Up to `1 + prefetch_units` of them are live (gathered, or being gathered) at once,
    or as many as are recomputed together; with 0 ahead nothing overlaps. A node is released in
    backward when the gradient of its input has been made and all its own gradients have arrived.
    Gradients of at most two units wait whole for their reduction. After an exception the model is
    unusable.
    """

    def __init__(
        self,
        model: nn.Module,
        nodes: list[Node],
        *,
        prefetch_units: int,
        timers: Timers | None = None,
    ) -> None:
        self.model = model
        self.nodes = nodes
        self._timers = timers or Timers()
        self.units = [unit for node in nodes for unit in node.own]
        self.trainable_units = [unit for unit in self.units if unit.trainable]
        self._max_live = 1 + prefetch_units
        self._max_whole_grads = 2 if prefetch_units else 1
        self._phase = Phase.IDLE
        self._last = False
        self._upcoming: deque[Node] = deque()
        self._live: list[Node] = []
        self._reducing: deque[ShardedUnit] = deque()
        self._handles: list[RemovableHandle] = []
        parameters = dict(model.named_parameters())
        for node in nodes:
            self._hook(node, parameters)

    # What the training loop calls #

    def begin_step(self, num_micro_batches: int) -> None:
        """Says how many micro-batches make the step that starts now."""
        self._assert_idle()
        backward = [node for node in reversed(self.nodes[:-1]) if node.in_backward]
        for _ in range(num_micro_batches):
            self._upcoming.extend([*self.nodes, *backward])

    def forward_backward(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor,
        weights_BS: Tensor,
        *,
        last: bool,
        **documents: Any,
    ) -> Tensor:
        """Accumulates the gradients of one micro-batch and returns its weighted loss.

        `documents` is what the model takes by name.
        """
        assert self._phase is Phase.IDLE, f"a micro-batch begins in {self._phase}"
        self._phase, self._last = Phase.FORWARD, last
        for node in self.nodes:
            node.input_grad_made = False
            node.num_units_to_arrive = len(node.trainable())
        with self._timers.measure("forward-compute", level=2):
            loss = self.model(tokens_BS, labels_BS, weights_BS, **documents)
        self._phase = Phase.BACKWARD
        with self._timers.measure("backward-compute", level=2):
            loss.backward()
        for node in self.nodes:
            assert node.num_units_to_arrive == 0, f"{node.name} received no gradient"
            if node.held_for_backward:
                self._release(node)
        self._phase = Phase.IDLE
        return loss.detach()

    def finish_gradients(self) -> None:
        """Waits until every gradient is summed in the optimizer's range of its unit."""
        self._assert_idle()
        assert not self._upcoming, f"the step has more to run: {self._upcoming}"
        while self._reducing:
            self._reducing.popleft().drop_whole_grad()
        for unit in self.trainable_units:
            unit.wait_reduced()

    @torch.no_grad()
    def evaluate(
        self, tokens_BS: Tensor, labels_BS: Tensor, weights_BS: Tensor, **documents: Any
    ) -> Tensor:
        """The weighted loss of a batch; keeps no gradient."""
        self._assert_idle()
        self._phase = Phase.EVALUATION
        self._upcoming.extend(self.nodes)
        loss = self.model(tokens_BS, labels_BS, weights_BS, **documents)
        self._phase = Phase.IDLE
        return loss

    def wait_published(self) -> None:
        """Waits until every rank's `param_shard` holds the last update."""
        for unit in self.units:
            unit.wait_published()

    def close(self) -> None:
        """Ends the lanes and groups; every rank calls it when nothing is under way.

        The model's hooks end with it: autograd keeps them alive, and they would keep all of this.
        """
        self.units[0].context.collectives.close()
        while self._handles:
            self._handles.pop().remove()

    def _assert_idle(self) -> None:
        assert self._phase is Phase.IDLE, f"the model is in {self._phase}"
        assert not self._live, f"live outside a step: {[node.name for node in self._live]}"

    # What autograd and the modules call #

    def _hook(self, node: Node, parameters: dict[str, nn.Parameter]) -> None:
        module = node.module
        before = module.register_forward_pre_hook(lambda *_: self._before_forward(node))
        after = module.register_forward_hook(lambda _m, _i, out: self._after_forward(node, out))
        self._handles += [before, after]
        for unit in node.trainable():
            for span in unit.layout.spans:
                self._hook_gradient(node, unit, span.box.name, parameters[span.box.name])

    def _hook_gradient(
        self, node: Node, unit: ShardedUnit, name: str, parameter: nn.Parameter
    ) -> None:
        def arrived(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            self._receive(node, unit, name, gradient)

        self._handles.append(parameter.register_post_accumulate_grad_hook(arrived))

    def _before_forward(self, node: Node) -> None:
        assert self._phase is not Phase.IDLE, f"{node.name} runs outside a step"
        self._require(node)
        if self._phase is Phase.BACKWARD:  # activations of several blocks are recomputed at once
            node.held_for_backward = True

    def _after_forward(self, node: Node, output: Tensor) -> None:
        if self._phase is Phase.BACKWARD:
            return
        if output.requires_grad:
            output.register_hook(lambda _grad: self._output_grad_made(node))
            if node is self.nodes[-1]:  # its backward follows at once
                node.held_for_backward = True
                return
        self._release(node)

    def _output_grad_made(self, node: Node) -> None:
        """Runs right before the backward of `node`, when the one after it is through."""
        if node.index + 1 < len(self.nodes):
            following = self.nodes[node.index + 1]
            following.input_grad_made = True
            self._release_if_through(following)
        if node.in_backward:
            node.held_for_backward = True
            self._require(node)
        else:
            self._top_up()

    def _receive(self, node: Node, unit: ShardedUnit, name: str, gradient: Tensor) -> None:
        if unit.begins_whole_grad:
            # Its own of the last micro-batch may still be read too, where units are few.
            while unit in self._reducing or len(self._reducing) >= self._max_whole_grads:
                self._reducing.popleft().drop_whole_grad()
            unit.take_whole_grad()
            self._reducing.append(unit)
        if unit.receive(name, gradient):
            with torch.profiler.record_function(f"paro/reduce:{unit.name}"):
                unit.reduce(last=self._last)
            node.num_units_to_arrive -= 1
            self._release_if_through(node)

    # Gathering ahead and releasing behind #

    def _require(self, node: Node) -> None:
        """Makes a node's parameters readable, and gathers ahead while it runs."""
        if node not in self._live:
            self._upcoming.remove(node)  # the next one, or further on when recomputing
            self._gather(node)
        self._top_up()
        for unit in node.needed:
            unit.use()

    def _top_up(self) -> None:
        while self._upcoming and len(self._live) < self._max_live:
            node = self._upcoming[0]
            # A unit that is still held is released before it is gathered anew, however near.
            if node in self._live or any(unit.held for unit in node.needed):
                return
            self._gather(self._upcoming.popleft())

    def _gather(self, node: Node) -> None:
        self._live.append(node)
        for unit in node.needed:
            if unit.state is UnitState.SHARDED:
                with torch.profiler.record_function(f"paro/gather:{unit.name}"):
                    unit.gather()

    def _release_if_through(self, node: Node) -> None:
        input_done = node.input_grad_made or not node.input_needs_grad
        if node.held_for_backward and input_done and node.num_units_to_arrive == 0:
            self._release(node)
            self._top_up()

    def _release(self, node: Node) -> None:
        node.held_for_backward = False
        self._live.remove(node)
        shared = {unit for other in self._live for unit in other.needed}
        for unit in node.needed:
            if unit not in shared:
                unit.release()
