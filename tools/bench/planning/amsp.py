"""How AMSP and InternEvo reduce gradients and broadcast updates: every tensor has one owner."""

# Optimizer state is not cut into equal slices, every tensor has one owner (AMSP section IV, and
# InternEvo's hybrid_zero_optim.py). So a step ends differently from one of this project's engine:
#
#     gradients  an all-reduce over all ranks with the same parameters; each keeps what it owns
#     updates    a broadcast by every owner, one after the other, as many as there are owners
#
# and parameters are gathered, and gradients reduced, tensor by tensor. A broadcast goes along a
# chain: the latency of one lap, and every byte once over the slowest links. A step has as many such
# latencies as owners, unlike the rest of the training: on 1024 ranks they dominate.

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import linear_regression

from model.config import parameter_shapes, unit_shapes
from paro.collectives.schedule import Op
from paro.planning.cost_model import UnitSize
from paro.planning.machine.collective_time import Job, Phase, ring_of
from paro.planning.machine.machine import GroupSpeed
from paro.planning.search.estimator import Estimate, Estimator
from paro.planning.search.search_space import Candidate, Workload
from paro.planning.step.comm_costs import CommCosts, UnitCommCosts
from paro.planning.step.costs import StepCosts
from paro.planning.step.gathering_thread import GatheringThread
from paro.planning.step.simulation import Program, Simulation, Wait, Works
from paro.precision import BYTES_OF
from paro.topology import AxisSpan


@dataclass(frozen=True, kw_only=True)
class OwnedTensors(CommCosts):
    """Communication of units whose tensors have owners; grads must be sharded as params are."""

    num_tensors: int  # each has an owner
    matrices_of_block: int  # gathered and reduced one by one; norms are sent with them

    def of_unit(self, unit: UnitSize) -> Iterator[UnitCommCosts]:
        params, grads = self.strategy.params, self.strategy.grads
        assert params == grads, f"{self.strategy.name}: of grads finer than params nothing is said"
        compute, wire = BYTES_OF[self.precision.compute], BYTES_OF[self.precision.wire]
        between = self.topology.axes_between
        span = between(params, self.machine.world_size)
        summed = unit.trainable_numel // params * wire
        for own in super().of_unit(unit):
            assert own.trainable, f"{unit.name}: of frozen tensors nothing is said"
            yield replace(
                own,
                gather=self._tensor_by_tensor(own.gather, between(1, params), unit),
                reduce=self._tensor_by_tensor(own.reduce, between(1, grads), unit),
                step_reduce=(),
                replicas=self.times.phases(Op.ALL_REDUCE, span, summed),
                gather_updated=self._broadcasts(unit, unit.trainable_numel // params * compute),
            )

    def _tensor_by_tensor(
        self, phases: tuple[Phase, ...], span: AxisSpan, unit: UnitSize
    ) -> tuple[Phase, ...]:
        """Adds the latency of one lap for every matrix but the first."""
        if not span:
            return phases
        matrices = self.matrices_of_block if unit in self.units[1:-1] else 1
        more = (matrices - 1) * ring_of(self.machine, span).lap_seconds
        (job,), *others = phases
        assert not others, "one collective over all axes"
        return ((job._replace(seconds=job.seconds + more),),)

    def _broadcasts(self, unit: UnitSize, num_bytes: int) -> tuple[Phase, ...]:
        """A unit's part of a step's broadcasts."""
        span = self.topology.axes_between(self.strategy.params, self.strategy.optim)
        if not span:
            return ()
        ring = ring_of(self.machine, span)
        share = unit.numel / sum(other.numel for other in self.units)
        laps = min(self.num_tensors, ring.size) * share
        crosses = span[-1].outer > self.machine.group_size
        job = Job(
            stream=tuple(axis.index for axis in span),
            seconds=laps * ring.lap_seconds + num_bytes * ring.seconds_per_byte,
            intra=0.0 if crosses else 1.0,
            inter=1.0 if crosses else 0.0,
            cpu=0.0,
        )
        return ((job,),)


class _Thread(GatheringThread):
    """Waits for some kinds of work where they are queued."""

    waits_for: Collection[str] = ()

    def _wait_unless_overlapped(self, works: Works) -> Program:
        if any(work.kind in self.waits_for for work in works):
            yield Wait(works)


class OwnedTensorsEstimator(Estimator):
    """Estimates steps that send as AMSP's do, with flat collectives; `sent` is unchanged.

    `waits_for` has the kinds of communication that do not overlap with compute, as the simulation
    names them: they count in the step's time, not in its exposed parts.
    """

    def __init__(self, workload: Workload, *, waits_for: Collection[str] = ()) -> None:
        super().__init__(workload)
        self.waits_for = waits_for

    def costs(self, candidate: Candidate) -> StepCosts:
        model, found = self.workload.model, super().costs(candidate)
        comm_costs = OwnedTensors(
            units=self.units,
            strategy=candidate.strategy,
            group_size=self.workload.group_size,
            precision=self.workload.precision,
            times=found.comm_costs.times,
            num_tensors=len(parameter_shapes(model)),
            matrices_of_block=sum(len(s) == 2 for s in unit_shapes(model)["blocks.0"].values()),
        )
        return replace(found, comm_costs=comm_costs)

    def estimate(self, candidate: Candidate, *, record: bool = False) -> Estimate:
        found = super().estimate(candidate, record=record)
        if not self.waits_for:
            return found
        costs, simulation = self.costs(candidate), Simulation(1)
        (actor,) = simulation.actors
        groups = GroupSpeed(num_groups=costs.machine.num_groups)
        thread = _Thread(costs, simulation, actor, groups)
        thread.waits_for = self.waits_for
        seconds = simulation.run([thread.program()])
        return replace(
            found,
            timeline=replace(found.timeline, seconds=seconds),
            tokens_per_second=found.tokens_per_second * found.seconds / seconds,
            mfu=found.mfu * found.seconds / seconds,
        )


def with_speeds_of(workload: Workload, strategy: str, runs: Mapping[int, float]) -> Workload:
    """The workload on devices that compute as fast as runs in which everything overlaps.

    `runs` has the tokens per second and rank by the number of micro-batches. In a line fitted to
    the step times the slope is a micro-batch's computing; the intercept is the rest of a step,
    including what the model does not explain.
    """
    counts = sorted(runs)
    tokens = workload.micro_batch_size * workload.seq_length
    line = linear_regression(counts, [count * tokens / runs[count] for count in counts])
    estimator = OwnedTensorsEstimator(
        replace(
            workload,
            prefetch_units=1,
            global_batch_size=workload.micro_batch_size * workload.world_size,
        )
    )
    candidate = workload.candidate(workload.strategy(strategy))
    costs, one = estimator.costs(candidate), estimator.estimate(candidate).seconds
    products, collecting = costs.computing.seconds, costs.collect_seconds(costs.num_trained)
    other_seconds = one - products - collecting - costs.device.step_seconds
    device = replace(
        costs.device,
        sustained_flops=costs.device.sustained_flops * products / (line.slope - collecting),
        step_seconds=max(0.0, line.intercept - other_seconds),
    )
    return replace(workload, machine=replace(workload.machine, device=device))
