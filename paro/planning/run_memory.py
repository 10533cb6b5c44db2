"""Predicts the memory of a rank and the bytes that it sends, for trainer and planner."""

from __future__ import annotations

from dataclasses import replace

from paro.collectives.choice import AlgorithmChoice
from paro.distributed.byte_counter import Sent
from paro.layout import Unit
from paro.machine.caching import cached_by
from paro.machine.choice import choice_of, pieces_by
from paro.machine.collective_time import algorithms_of
from paro.machine.machine import Machine
from paro.planning.activations import Activations, PartActivations
from paro.planning.context_parallel import ContextAttention
from paro.planning.device_memory import (
    Communication,
    DeviceMemory,
    communication_of,
    device_memory,
)
from paro.planning.sending import Sender, traffic_of
from paro.planning.step_counts import StepCounts
from paro.planning.tally import MemorySnapshot, StepTally
from paro.precision import BYTES_OF
from paro.spec.run_spec import RunSpec
from paro.spec.sharding_spec import ModelStateBytes, state_bytes
from paro.spec.units import shape_of_run, units_of_run


class RunMemory:
    """The memory and traffic of runs that differ only in the choices of a search.

    Parts that they share are computed once.
    """

    def __init__(self, machine: Machine | None) -> None:
        self._machine = machine
        self._pieces = pieces_by(machine)

    @cached_by(
        lambda run: (
            run.trained,
            run.materialize.rotates and run.strategy.params,
            run.materialize,
            run.bucket_size,
        )
    )
    def units(self, run: RunSpec) -> tuple[Unit, ...]:
        """Return the units of a run."""
        return units_of_run(run)

    @cached_by(lambda run: run.step_kind)
    def step(self, run: RunSpec) -> StepCounts:
        """Return the actions of a step of a run, with their counts."""
        units = self.units(run)
        shape = shape_of_run(run, units)
        return StepCounts(shape=shape, units=units, updated_ahead=run.updated_ahead)

    def sender(self, run: RunSpec, rank: int | None = None) -> Sender:
        """Return a rank as a sender of collectives; None: the mean of all ranks."""
        by_nccl = run.device_type == "cuda"
        choice = choice_of(run.collective, self._machine, by_nccl=by_nccl)
        return Sender(group_size=run.group_size, rank=rank, choice=choice)

    def sent(self, run: RunSpec, num_micro_batches: int, rank: int | None = None) -> Sent:
        """Count bytes that a rank sends in a step; None: the mean of all ranks."""
        step, sender = self.step(run), self.sender(run, rank)
        specs = run.specs(step.units)
        states = traffic_of(step.of_step(num_micro_batches), specs, sender)
        moves = step.schedule(1).actions() if run.context.size > 1 else ()
        attention = ContextAttention.of_run(run).sent(moves, sender)
        return states + attention * num_micro_batches

    def of(self, run: RunSpec) -> DeviceMemory:
        """Predict the memory at the largest snapshot of a step, or of an evaluation if larger."""
        machine, snapshot = self._machine, self._snapshot(run)
        if run.trained and run.eval_micro_batch_size > run.micro_batch_size:
            # Only then: backward needs more than forward alone.
            size = run.eval_micro_batch_size
            forward = self._snapshot(replace(run, trained=frozenset(), micro_batch_size=size))
            name = f"{forward.name} in an evaluation (--eval-micro-batch-size {size})"
            evaluation = forward._replace(name=name, states=snapshot.states)
            snapshot = max(snapshot, evaluation, key=lambda one: one.total)
        device = None if machine is None else machine.device
        return device_memory(snapshot, self.communication(run), device, run.device_type)

    def _snapshot(self, run: RunSpec) -> MemorySnapshot:
        specs = run.specs(self.units(run))
        points = (now.with_copies(run, specs) for now in self._points(run))
        return max(points, key=lambda now: now.total)._replace(states=self._states(run).total)

    @cached_by(lambda run: (run.step_kind, run.micro_batch_size, run.context))
    def _points(self, run: RunSpec) -> list[MemorySnapshot]:
        return self.tally(run).largest()

    @cached_by(lambda run: (run.strategy.degrees, run.materialize, run.trained, run.precision))
    def _states(self, run: RunSpec) -> ModelStateBytes:
        return state_bytes(run.specs(self.units(run)))

    def tally(self, run: RunSpec) -> StepTally:
        """Make a tally of the bytes that the actions of a step allocate."""
        precision = run.precision
        grad_dtype = precision.wire if run.strategy.grads > 1 else precision.accumulate
        kind = PartActivations if run.materialize.rotates else Activations
        activations = kind(config=run.config, batch=run.batch, grad_bytes=BYTES_OF[grad_dtype])
        step = self.step(run)
        return StepTally(run=run, step=step, activations=[*activations.of_step(step)])

    @cached_by(
        lambda run: (
            run.strategy.degrees,
            run.precision,
            run.context,
            run.collective,
            run.materialize,
        )
    )
    def communication(self, run: RunSpec) -> Communication:
        """Count the process groups and communication buffers of a run."""
        by_nccl = run.device_type == "cuda"
        names: tuple[str, ...] = (run.collective,)
        if run.collective == "auto":
            names = algorithms_of(self._machine, by_nccl=by_nccl)
        choice = AlgorithmChoice(names=names, pieces=self._pieces if by_nccl else None)
        return communication_of(run, run.specs(self.units(run)), choice)
