"""Communication costs of a strategy on a machine: bytes, axes and time of every unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import fsum

from paro.collectives.schedule import Op
from paro.planning.cost_model import (
    UnitSize,
    codes_of,
    gradient_codes_of,
    strategy_of,
    updated_bytes,
)
from paro.planning.machine.collective_time import CollectiveTimes, ParallelJobs
from paro.planning.machine.machine import Machine
from paro.precision import BYTES_OF, PrecisionConfig
from paro.strategy import Strategy, make_comm_plan
from paro.topology import AxisSpan, Topology, make_topology, split_by_link

# A unit's trained and frozen elements, those of matrices, and whether it is replicated.
CostKey = tuple[int, int, int, bool]

# Memory traffic of an element's codes, counted in paro/quantization/blocks.py: what every operation
# reads and writes.
_ENCODED_BYTES = 70
_DECODED_BYTES = 40
_TRANSFORM_BYTES = 60
CODING_BYTES = _ENCODED_BYTES + _DECODED_BYTES + _TRANSFORM_BYTES
# Reads the error and the codes, encodes the new error; three operations on fp32 values.
_FEEDBACK_BYTES = 2 * _DECODED_BYTES + _ENCODED_BYTES + 3 * 12


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCommCosts:
    """The collectives of one of a unit's two flat buffers, each as its phases.

    Where weights rotate, a gather, or a reduction, is a pass round the ring: its phases are shifts.
    """

    gather: tuple[ParallelJobs, ...]
    reduce: tuple[ParallelJobs, ...] = ()
    step_reduce: tuple[ParallelJobs, ...] = ()  # the step's gradient reduce-scatter
    replicas: tuple[ParallelJobs, ...] = ()  # the replica all-reduce
    gather_updated: tuple[ParallelJobs, ...] = ()
    accumulated_bytes: int = 0  # read and written after every reduction, in its comm stream
    converted_bytes: int = 0  # read and written to change dtype around the last reductions
    encoded_bytes: int = 0  # read and written to encode updated parameters and decode them
    decoded_bytes: int = 0  # the same to decode other ranks', in a comm stream of reductions
    coded_bytes: int = 0  # the same for the codes of gradients, in their comm stream
    trainable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """Seconds for which a step keeps links busy, and of all its collectives one after the other."""

    intra: float
    inter: float
    one_by_one: float


@dataclass(frozen=True, kw_only=True)
class CommCosts:
    """All collectives of a model's units under a strategy, in a run with groups of `group_size`."""

    units: tuple[UnitSize, ...]
    strategy: Strategy
    group_size: int
    precision: PrecisionConfig
    times: CollectiveTimes
    rotates: bool = False
    in_place: bool = False

    @property
    def machine(self) -> Machine:
        return self.times.machine

    @cached_property
    def topology(self) -> Topology:
        return make_topology(
            world_size=self.machine.world_size,
            group_size=self.group_size,
            degrees=self.strategy.degrees,
        )

    @cached_property
    def per_unit(self) -> tuple[tuple[UnitCommCosts, ...], ...]:
        """For every unit: costs of its trainable buffer and of its frozen one, if not empty."""
        return tuple(self.per_kind[kind_of(unit)] for unit in self.units)

    @cached_property
    def per_kind(self) -> dict[CostKey, tuple[UnitCommCosts, ...]]:
        """The same by kind: units of equal kind have equal costs."""
        units = {kind_of(unit): unit for unit in self.units}
        return {kind: tuple(self.of_unit(unit)) for kind, unit in units.items()}

    def loads(self, num_micro_batches: int) -> Loads:
        """The loads of a whole step."""
        sums = [often * num_micro_batches + once for often, once in self._sums]
        return Loads(intra=sums[0], inter=sums[1], one_by_one=sums[2])

    @cached_property
    def _sums(self) -> tuple[tuple[float, float], tuple[float, float], tuple[float, float]]:
        """Seconds (per micro-batch, once per step) of: intra links, inter links, one by one."""
        counts: Counter[CostKey] = Counter()
        gathers: Counter[CostKey] = Counter()
        reductions: Counter[CostKey] = Counter()
        for unit in self.units:
            key = kind_of(unit)
            counts[key] += 1
            gathers[key] += unit.gathers_per_micro_batch
            reductions[key] += unit.reductions_per_micro_batch
        terms: list[tuple[float, float, tuple[ParallelJobs, ...]]] = []
        for key, count in counts.items():
            for part in self.per_kind[key]:
                terms.append((gathers[key], 0, part.gather))
                terms.append((reductions[key], 0, part.reduce))
                terms += [
                    (0, count, p) for p in (part.step_reduce, part.replicas, part.gather_updated)
                ]

        def total(measure: int) -> tuple[float, float]:
            values = [(often, once, _seconds(phases)[measure]) for often, once, phases in terms]
            return fsum(o * v for o, _, v in values), fsum(o * v for _, o, v in values)

        return total(0), total(1), total(2)

    @cached_property
    def coding_bytes(self) -> int:
        """Memory traffic of all codes of a step; 0 if none are sent."""
        parts = (part for parts in self.per_unit for part in parts)
        return sum(part.encoded_bytes + part.decoded_bytes + part.coded_bytes for part in parts)

    def of_unit(self, unit: UnitSize) -> Iterator[UnitCommCosts]:
        """Costs of a unit's trainable buffer and of its frozen one, if not empty."""
        compute, wire = BYTES_OF[self.precision.compute], BYTES_OF[self.precision.wire]
        strategy = strategy_of(unit, self.strategy)
        params, grads, optim = strategy.degrees
        plan, phases = make_comm_plan(strategy, self.topology), self.times.phases
        numel = unit.trainable_numel
        if numel:
            accumulate = BYTES_OF[self.precision.accumulate]
            added = numel // grads * (wire + 2 * accumulate)
            converted = 0
            if wire != accumulate and (plan.step_reduce or plan.replicas):  # before and after
                converted = (numel // grads + numel // optim) * (wire + accumulate)
            updated = updated_bytes(unit, strategy, self.topology, self.precision) // params
            codes = codes_of(unit, strategy, self.topology, self.precision)
            both, others = _ENCODED_BYTES + _DECODED_BYTES, numel // params - numel // optim
            step_reduce, replicas, coded = self._sums_of_step(unit, strategy)
            yield UnitCommCosts(
                trainable=True,
                gather=self._per_micro_batch(Op.ALL_GATHER, plan.gather, numel * compute),
                reduce=self._per_micro_batch(Op.REDUCE_SCATTER, plan.reduce, numel * wire),
                step_reduce=step_reduce,
                replicas=replicas,
                gather_updated=phases(Op.ALL_GATHER, plan.gather_updated, updated),
                accumulated_bytes=added if grads > 1 and not self.rotates else 0,
                converted_bytes=converted,
                coded_bytes=coded,
                encoded_bytes=0 if codes is None else numel // optim * both,
                decoded_bytes=0 if codes is None else others * _DECODED_BYTES,
            )
        if unit.frozen_numel:
            frozen = unit.frozen_numel * BYTES_OF[self.precision.frozen]
            yield UnitCommCosts(gather=self._per_micro_batch(Op.ALL_GATHER, plan.gather, frozen))

    def _sums_of_step(
        self, unit: UnitSize, strategy: Strategy
    ) -> tuple[tuple[ParallelJobs, ...], tuple[ParallelJobs, ...], int]:
        """The step's reduce-scatter and all-reduce, and the memory traffic of their codes."""
        plan, phases = make_comm_plan(strategy, self.topology), self.times.phases
        numel, wire = unit.trainable_numel, BYTES_OF[self.precision.wire]
        codes = gradient_codes_of(unit, strategy, self.topology, self.precision)
        if codes is None:
            reduced, summed = numel // strategy.grads * wire, numel // strategy.optim * wire
            return (
                phases(Op.REDUCE_SCATTER, plan.step_reduce, reduced),
                phases(Op.ALL_REDUCE, plan.replicas, summed),
                0,
            )
        intra, inter = split_by_link((*plan.step_reduce, *plan.replicas))
        encoded, outside = codes.range_bytes * self.topology.world_size, inter[0].inner
        feedback = _FEEDBACK_BYTES if self.precision.inter_grad_error_feedback else 0
        return (
            (
                *phases(Op.REDUCE_SCATTER, intra, numel // strategy.grads * wire),
                *phases(Op.REDUCE_SCATTER, inter, encoded // outside),
            ),
            phases(Op.ALL_GATHER, plan.replicas, encoded // strategy.optim),
            numel // outside * (CODING_BYTES + feedback),
        )

    def _per_micro_batch(self, op: Op, span: AxisSpan, num_bytes: int) -> tuple[ParallelJobs, ...]:
        """A collective of every micro-batch; where weights rotate, always a pass round the ring."""
        if self.rotates:
            return self.times.shifts(span, num_bytes, in_place=self.in_place)
        return self.times.phases(op, span, num_bytes)


def kind_of(unit: UnitSize) -> CostKey:
    return unit.trainable_numel, unit.frozen_numel, unit.matrix_stop, unit.replicated


def seconds_of(phases: tuple[ParallelJobs, ...]) -> float:
    """Duration of phases one after the other that share links with nothing else."""
    return _seconds(phases)[2]


def _seconds(phases: tuple[ParallelJobs, ...]) -> tuple[float, float, float]:
    jobs = [job for phase in phases for job in phase]
    return (
        fsum(job.seconds * job.intra for job in jobs),
        fsum(job.seconds * job.inter for job in jobs),
        fsum(max(job.seconds for job in phase) for phase in phases),
    )
