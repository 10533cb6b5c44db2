"""Runs a sharded model: prefetches all-gathers, frees after use, reduces during backward."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from paro.distributed.profile_range import profile_range
from paro.distributed.timers import Timers
from paro.sharding.distributed_model import DistributedModel, MicroBatchState, Phase
from paro.sharding.sharded_unit import ShardedUnit, UnitState
from paro.sharding.wrap import UnitModule


class ShardedModel(DistributedModel):
    """A model whose unit modules have whole parameters only while they run.

    The order of a step is known in advance: for every micro-batch all unit modules forward, then
    backward in reverse. Up to `1 + prefetch_units` of them are live (gathered or being gathered) at
    once, or as many as are recomputed together; with `prefetch_units` 0 nothing overlaps. In
    backward a unit module is released when its input gradient is computed and all its parameter
    gradients have arrived. At most two units hold whole gradients that wait to be reduced.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: list[UnitModule],
        timers: Timers,
        *,
        prefetch_units: int,
    ) -> None:
        units = [unit for module in modules for unit in module.own]
        super().__init__(model, units, MicroBatchState(), timers)
        self.modules, self._sharded = modules, units
        self._max_live = 1 + prefetch_units
        self._max_whole_grads = 2 if prefetch_units else 1
        self._upcoming: deque[UnitModule] = deque()
        self._live: list[UnitModule] = []
        self._reducing: deque[ShardedUnit] = deque()
        parameters = dict(model.named_parameters())
        borrowed = {unit for module in modules for unit in module.needed if unit not in module.own}
        for module in modules:
            self._hook(module, parameters)
            for unit in module.trainable():
                if unit not in borrowed:  # its gradients have one part
                    self._add_sinks(module, unit, parameters)

    # Called by the training loop #

    def begin_step(self, num_micro_batches: int, *, exact: bool = False) -> None:
        """Starts a step of `num_micro_batches` micro-batches; `exact`: it sends no codes."""
        super().begin_step(num_micro_batches, exact=exact)
        backward = [module for module in reversed(self.modules[:-1]) if module.in_backward]
        for _ in range(num_micro_batches):
            self._upcoming.extend([*self.modules, *backward])
        for unit in self._sharded:
            if not unit.is_gathered:
                unit.keep_casts()

    def finish_gradients(self) -> None:
        """Waits until each unit's optimizer range holds the gradients summed over all ranks."""
        assert not self._upcoming, f"the step has more to run: {self._upcoming}"
        while self._reducing:
            self._reducing.popleft().free_whole_grad()
        for unit in self._sharded:
            unit.drop_casts()
        super().finish_gradients()

    def _begin(self, phase: Phase) -> None:
        if phase is Phase.EVALUATION:
            self._assert_idle()
            self._upcoming.extend(self.modules)
        super()._begin(phase)
        for module in self.modules:
            module.input_grad_made = False
            module.num_units_to_arrive = len(module.trainable())

    def _end_backward(self) -> None:
        for module in self.modules:
            assert module.num_units_to_arrive == 0, f"{module.name} received no gradient"
            if module.held_for_backward:
                self._release(module)

    def _assert_idle(self) -> None:
        super()._assert_idle()
        assert not self._live, f"live outside a step: {[module.name for module in self._live]}"

    # Called by autograd and module hooks #

    def _hook(self, module: UnitModule, parameters: dict[str, nn.Parameter]) -> None:
        before = module.wrapped.register_forward_pre_hook(lambda *_: self._before_forward(module))
        after = module.wrapped.register_forward_hook(
            lambda _m, _i, out: self._after_forward(module, out)
        )
        self._handles += [before, after]
        for unit in module.trainable():
            for span in unit.layout.spans:
                name = span.box.name
                self._on_gradient(parameters[name], partial(self._receive, module, unit, name))

    def _add_sinks(
        self, module: UnitModule, unit: ShardedUnit, parameters: dict[str, nn.Parameter]
    ) -> None:
        for span in unit.layout.spans:
            name = span.box.name
            sink = _Sink(self, module, unit, name)
            parameters[name].grad_sink = sink  # type: ignore[attr-defined]
            self._handles.append(_Removal(parameters[name]))

    def _before_forward(self, module: UnitModule) -> None:
        assert self._state.phase is not Phase.IDLE, f"{module.name} runs outside a step"
        self._require(module)
        if self._state.phase is Phase.BACKWARD:  # activation recomputation, maybe of several blocks
            module.held_for_backward = True

    def _after_forward(self, module: UnitModule, output: Tensor) -> None:
        if self._state.phase is Phase.BACKWARD:
            return
        if output.requires_grad:
            output.register_hook(lambda _grad: self._output_grad_made(module))
            if module is self.modules[-1]:  # its backward runs next
                module.held_for_backward = True
                return
        self._release(module)

    def _output_grad_made(self, module: UnitModule) -> None:
        """Runs right before the backward of `module`, after that of the next unit module."""
        if module.index + 1 < len(self.modules):
            next_unit = self.modules[module.index + 1]
            next_unit.input_grad_made = True
            self._release_if_through(next_unit)
        if module.in_backward:
            module.held_for_backward = True
            self._require(module)
        else:
            self._top_up()

    def _receive(self, module: UnitModule, unit: ShardedUnit, name: str, gradient: Tensor) -> None:
        self.prepare_whole_grad(unit)
        if unit.receive(name, gradient):
            self.reduce(module, unit)

    def prepare_whole_grad(self, unit: ShardedUnit) -> None:
        """Allocates the unit's buffer of whole gradients before the first arrives."""
        if unit.begins_whole_grad:
            # With few units, its own buffer of the last micro-batch may also still be in use.
            while unit in self._reducing or len(self._reducing) >= self._max_whole_grads:
                self._reducing.popleft().free_whole_grad()
            unit.alloc_whole_grad()
            self._reducing.append(unit)

    def reduce(self, module: UnitModule, unit: ShardedUnit) -> None:
        """Queues the reduction of the unit's gradients, which have all arrived."""
        with profile_range(f"reduce:{unit.name}"):
            unit.reduce(last=self._state.last)
        module.num_units_to_arrive -= 1
        self._release_if_through(module)

    # Prefetch and release #

    def _require(self, module: UnitModule) -> None:
        """Makes the parameters of `module` readable and prefetches while it runs."""
        if module not in self._live:
            self._upcoming.remove(module)  # not always the first one when recomputing
            self._gather(module)
        self._top_up()
        for unit in module.needed:
            unit.use()
            if self._state.phase is Phase.BACKWARD:  # recomputation's forward may come
                unit.keep_casts()

    def _top_up(self) -> None:
        while self._upcoming and len(self._live) < self._max_live:
            module = self._upcoming[0]
            # A unit that is still held must be released before it is gathered again.
            if module in self._live or any(unit.held for unit in module.needed):
                return
            self._gather(self._upcoming.popleft())

    def _gather(self, module: UnitModule) -> None:
        self._live.append(module)
        for unit in module.needed:
            if unit.state is UnitState.SHARDED:
                with profile_range(f"gather:{unit.name}"):
                    unit.gather()

    def _release_if_through(self, module: UnitModule) -> None:
        input_done = module.input_grad_made or not module.input_needs_grad
        if module.held_for_backward and input_done and module.num_units_to_arrive == 0:
            self._release(module)
            self._top_up()

    def _release(self, module: UnitModule) -> None:
        module.held_for_backward = False
        self._live.remove(module)
        shared = {unit for other in self._live for unit in other.needed}
        for unit in module.needed:
            if unit not in shared:
                unit.release()


@dataclass(frozen=True, slots=True)
class _Sink:
    """Takes a weight's gradient from the matmul that makes it: it is neither copied nor added."""

    model: ShardedModel
    module: UnitModule
    unit: ShardedUnit
    name: str

    def open(self) -> tuple[Tensor, bool]:
        """The buffer for the gradient, and whether to add to what it holds."""
        self.model.prepare_whole_grad(self.unit)
        return self.unit.grad_box(self.name)

    def close(self) -> None:
        """Says that the gradient is in the buffer."""
        if self.unit.arrived():
            self.model.reduce(self.module, self.unit)


@dataclass(frozen=True, slots=True)
class _Removal:
    """Takes a parameter's sink away, as a hook's handle removes the hook."""

    parameter: nn.Parameter

    def remove(self) -> None:
        del self.parameter.grad_sink  # type: ignore[attr-defined]
