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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import linear_regression

from model.config import parameter_shapes
from paro.collectives.schedule import Op
from paro.planning.cost_model import UnitSize
from paro.planning.machine.collective_time import CollectiveTimes, Job, Phase, ring_of
from paro.planning.search.planner import Estimator
from paro.planning.search.search_space import Candidate, Workload
from paro.planning.step.comm_costs import CommCosts, UnitCommCosts
from paro.precision import BYTES_OF
from paro.topology import AxisSpan


@dataclass(frozen=True, kw_only=True)
class OwnedTensors(CommCosts):
    """Communication of units whose tensors have owners; grads must be sharded as params are."""

    num_tensors: int  # each has an owner
    matrices_of_block: int  # gathered and reduced one by one; norms are sent with them

    def moving(self, unit: UnitSize) -> Iterator[UnitCommCosts]:
        params, grads = self.strategy.params, self.strategy.grads
        assert params == grads, f"{self.strategy.name}: of grads finer than params nothing is said"
        compute, wire = BYTES_OF[self.precision.compute], BYTES_OF[self.precision.wire]
        run = self.topology.axes_between(params, self.machine.world_size)
        summed = unit.trainable_numel // params * wire
        for own in super().moving(unit):
            assert own.trainable, f"{unit.name}: of frozen tensors nothing is said"
            yield replace(
                own,
                gather=self._tensor_by_tensor(own.gather, self.runs["gather"], unit),
                reduce=self._tensor_by_tensor(own.reduce, self.runs["reduce"], unit),
                finish=(),
                replicas=self.times.phases(Op.ALL_REDUCE, run, summed),
                publish=self._broadcasts(unit, unit.trainable_numel // params * compute),
            )

    def _tensor_by_tensor(
        self, phases: tuple[Phase, ...], run: AxisSpan, unit: UnitSize
    ) -> tuple[Phase, ...]:
        """Adds the latency of one lap for every matrix but the first."""
        if not run:
            return phases
        matrices = self.matrices_of_block if unit.name.startswith("blocks.") else 1
        more = (matrices - 1) * ring_of(self.machine, run).lap_seconds
        (job,), *others = phases
        assert not others, "one collective over all axes"
        return ((job._replace(seconds=job.seconds + more),),)

    def _broadcasts(self, unit: UnitSize, num_bytes: int) -> tuple[Phase, ...]:
        """A unit's part of a step's broadcasts."""
        run = self.runs["publish"]
        if not run:
            return ()
        ring = ring_of(self.machine, run)
        share = unit.numel / sum(other.numel for other in self.units)
        laps = min(self.num_tensors, ring.size) * share
        crosses = run[-1].outer > self.machine.group_size
        job = Job(
            stream=tuple(axis.index for axis in run),
            seconds=laps * ring.lap_seconds + num_bytes * ring.seconds_per_byte,
            intra=0.0 if crosses else 1.0,
            inter=1.0 if crosses else 0.0,
            cpu=0.0,
        )
        return ((job,),)


class OwnedTensorsEstimator(Estimator):
    """Estimates steps that send as AMSP's do, with flat collectives; `sent` is unchanged."""

    def moves(self, candidate: Candidate) -> CommCosts:
        shapes = parameter_shapes(self.workload.model)
        return OwnedTensors(
            units=self.units,
            strategy=candidate.strategy,
            precision=self.workload.precision,
            times=CollectiveTimes(self.workload.machine, candidate.collective),
            num_tensors=len(shapes),
            matrices_of_block=sum(
                name.startswith("blocks.0.") and len(shape) == 2 for name, shape in shapes.items()
            ),
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
            overlap=None,
            global_batch_size=workload.micro_batch_size * workload.world_size,
        )
    )
    candidate = workload.candidate(workload.strategy(strategy))
    costs, one = estimator.costs(candidate), estimator.estimate(candidate).seconds
    products, taking = costs.computing.seconds, costs.collect_seconds(costs.num_trained)
    besides = one - products - taking - costs.device.step_seconds
    device = replace(
        costs.device,
        sustained_flops=costs.device.sustained_flops * products / (line.slope - taking),
        step_seconds=max(0.0, line.intercept - besides),
    )
    return replace(workload, machine=replace(workload.machine, device=device))
