"""Predicts the memory of a rank and the bytes that it sends, for trainer and planner."""

# In: the description of a run (RunSpec), and a machine. Out: the bytes that a rank sends in a step,
# and the total that planner, dry run and trainer compare with the device's memory (DeviceMemory):
#
#     allocations      the largest memory snapshot of a step (tally.py)
#     buffers          of comm streams: chunks of HO-Ring's pipeline, permuted buffers of flat
#                      collectives, gathered buckets of native ones
#     quantized        quantized values and error feedback
#     fragmentation    the allocator's rounding, library workspaces, free blocks that are too small
#     communicators    of NCCL; under gloo only allocations and the context count
#     context          of CUDA; on CPU ranks what a process takes without a model (machine file)

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod

from paro.collectives.choice import AlgorithmChoice, has_both_links
from paro.collectives.pipeline import chunk_ranges, scratch_shards
from paro.collectives.schedule import Op
from paro.layout import Unit
from paro.machine.caching import cached_by
from paro.machine.collective_time import algorithms_of, choice_of, chunk_count_by
from paro.machine.machine import Machine
from paro.planning.activations import Activations, PartActivations
from paro.planning.context_parallel import AttentionSchedules
from paro.planning.sending import Sender, traffic_of
from paro.planning.step_counts import StepCounts
from paro.planning.tally import MemorySnapshot, StepTally
from paro.quantization.formats import RangeFormat
from paro.spec.offload import state_bytes
from paro.spec.run_spec import RunSpec, collectives_of, groups_of
from paro.spec.sharding_spec import ModelStateBytes, ShardingSpec
from paro.spec.units import shape_of_run, units_of_run
from paro.step.actions import OUTER_ROUND, ActionKind
from paro.topology import COLLECTIVE_STREAMS, AxisSpan, Sent, StreamKind

# Defaults for figures that a machine file lacks. CUDA context with all of torch's modules loaded:
# pytorch pull request 86509. A communicator on 4 A100, whatever the number of ranks: nccl issues
# 964 and 864. The allocator's share is assumed; `make gpu` compares it (part d).
CONTEXT_BYTES = 667 * 10**6
COMMUNICATOR_BYTES = 688 << 20
FRAGMENTATION = 0.05


class RunMemory:
    """The memory and traffic of runs that differ only in the choices of a search.

    Parts that several runs share are computed once.
    """

    def __init__(self, machine: Machine | None) -> None:
        self._machine = machine
        self._num_chunks = chunk_count_by(machine)

    @cached_by(lambda run: run.units_kind)
    def units(self, run: RunSpec) -> tuple[Unit, ...]:
        """Return the units of a run."""
        return units_of_run(run)

    @cached_by(lambda run: run.states_kind)
    def specs(self, run: RunSpec) -> list[ShardingSpec]:
        """Return the sharding specs of most steps of a run; buffers of equal kind share one."""
        step = self.step(run)
        specs = run.specs(step.units)
        return step.by_kind(lambda n: specs[n] if run.outer is None else specs[n].alone)

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
        states = traffic_of(step.of_step(num_micro_batches), self.specs(run), sender)
        actions = step.schedule(1).actions() if run.context.size > 1 else ()
        attention = AttentionSchedules(run).sent(actions, sender)
        return states + attention * num_micro_batches

    def sent_in_rounds(self, run: RunSpec, rank: int | None = None) -> Sent:
        """Count bytes that a rank sends in one round of every fragment; None: the mean."""
        sent = (spec.collectives.get(kind, ()) for spec in self.specs(run) for kind in OUTER_ROUND)
        return self.sender(run, rank).sent(chain.from_iterable(sent))

    def of(self, run: RunSpec) -> DeviceMemory:
        """Predict the memory at the largest snapshot of a step or of an evaluation."""
        snapshot = self._snapshot(run)
        size, copies = run.eval_micro_batch_size or run.micro_batch_size, 0
        if run.eval_ema:
            copies = sum(spec.sent_param_bytes for spec in self.specs(run))
        if run.trained and (size > run.micro_batch_size or copies):
            # Smaller evaluations never set the peak: backward needs more than forward alone.
            forward = self._snapshot(replace(run, trained=frozenset(), micro_batch_size=size))
            name = f"{forward.name} in an evaluation (--eval-micro-batch-size {size})"
            evaluation = forward._replace(
                name=name, states=snapshot.states, transient=forward.transient + copies
            )
            snapshot = max(snapshot, evaluation, key=lambda each: each.total)
        return replace(self.without_allocations(run), allocations=snapshot)

    def _snapshot(self, run: RunSpec) -> MemorySnapshot:
        specs = self.specs(run)
        points = [now.with_copies(run, specs) for now in self._points(run)]
        if run.outer is not None:
            points.append(self.tally(run).at("a round of outer steps", _round_bytes(specs)))
        return max(points, key=lambda now: now.total)._replace(states=self.states(run).total)

    @cached_by(lambda run: (run.step_kind, run.micro_batch_size, run.context))
    def _points(self, run: RunSpec) -> list[MemorySnapshot]:
        return self.tally(run).largest()

    @cached_by(lambda run: (run.states_kind, run.device_type))
    def states(self, run: RunSpec) -> ModelStateBytes:
        """Count bytes of model state of a run in a rank's device memory."""
        return state_bytes(self.specs(run), run.device_type)

    def tally(self, run: RunSpec) -> StepTally:
        """Make a tally of the bytes that the actions of a step allocate."""
        step, kind = self.step(run), PartActivations if run.materialize.rotates else Activations
        activations = [*kind(run).of_step(step)]
        return StepTally(run=run, step=step, specs=self.specs(run), activations=activations)

    @cached_by(lambda run: (run.states_kind, run.context, run.collective))
    def without_allocations(self, run: RunSpec) -> DeviceMemory:
        """Predict the rest of a rank's memory, by the figures of a machine file, or defaults."""
        by_nccl = run.device_type == "cuda"
        device = None if self._machine is None else self._machine.device
        context, communicator, fragmentation = 0, 0, 0.0
        if by_nccl:
            context, communicator, fragmentation = CONTEXT_BYTES, COMMUNICATOR_BYTES, FRAGMENTATION
        if device is not None:
            context = device.reserved_bytes
            if by_nccl and device.communicator_bytes is not None:
                communicator = device.communicator_bytes
            if by_nccl and device.fragmentation is not None:
                fragmentation = device.fragmentation
        names: tuple[str, ...] = (run.collective,)
        if run.collective == "auto":
            names = algorithms_of(self._machine, by_nccl=by_nccl)
        choice = AlgorithmChoice(names=names, num_chunks=self._num_chunks if by_nccl else None)
        specs = self.specs(run)
        return DeviceMemory(
            allocations=MemorySnapshot("no point"),
            buffers=_buffer_bytes(run, specs, choice),
            quantized=_code_bytes(specs) if run.precision.quantizes else 0,
            fragmentation_share=fragmentation,
            communicators=groups_of(run, specs, choice).number * communicator,
            context=context,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The bytes that a rank takes of its device, by part."""

    allocations: MemorySnapshot
    buffers: int = 0  # bytes of collectives' own buffers
    quantized: int = 0  # bytes of quantized updates and gradients, and of error feedback
    fragmentation_share: float = 0.0  # share of tensors' bytes that torch's allocator adds
    communicators: int = 0  # bytes of NCCL's communicators
    context: int = 0  # bytes of the CUDA context, or of a CPU process without a model

    @property
    def name(self) -> str:
        """The point of a step with the largest total."""
        return self.allocations.name

    @property
    def allocated(self) -> int:
        """The bytes of the rank's tensors at the peak."""
        return self.allocations.total + self.buffers + self.quantized

    @property
    def fragmentation(self) -> int:
        """The bytes that torch's allocator holds in addition to tensors."""
        return round(self.fragmentation_share * self.allocated)

    @property
    def reserved(self) -> int:
        """The bytes that torch's allocator holds at the peak."""
        return self.allocated + self.fragmentation

    @property
    def total(self) -> int:
        return self.reserved + self.communicators + self.context

    def parts(self) -> dict[str, int]:
        """Return the bytes of the total by name of part."""
        return {
            **self.allocations.parts(),
            "buffers of collectives": self.buffers,
            "codes of updates": self.quantized,
            "fragmentation": self.fragmentation,
            "communicators": self.communicators,
            "context": self.context,
        }

    def describe(self) -> str:
        """Return one line with all parts that are not 0, in GB, or in MB below 1 GB."""
        unit, scale = ("GB", 1e9) if self.total >= 1e9 else ("MB", 1e6)
        sizes = [f"{name} {size / scale:.1f}" for name, size in self.parts().items() if size]
        return f"{self.total / scale:.1f} {unit} at {self.name}: {', '.join(sizes)}"


def _buffer_bytes(run: RunSpec, specs: Sequence[ShardingSpec], choice: AlgorithmChoice) -> int:
    """Count bytes of the buffers that collectives allocate on a rank; 0 under gloo."""
    largest: dict[tuple[str, StreamKind, AxisSpan], int] = {}
    names, num_chunks = choice.names, choice.num_chunks
    if num_chunks is None:
        return 0
    for each in collectives_of(run, specs):
        if each.stream_kind not in COLLECTIVE_STREAMS:
            continue
        sizes = {}
        if "ho-ring" in names and has_both_links(each.span):
            # The scratch buffers of the pipeline.
            count = num_chunks(each.op, each.span, each.num_bytes)
            ranges = chunk_ranges(each.numel // each.num_shards, count)
            chunk = max(stop - start for start, stop in ranges) * each.itemsize
            sizes["ho-ring"] = chunk * sum(scratch_shards(each.span))
        if "flat" in names and each.op is not Op.ALL_REDUCE:
            sizes["flat"] = each.num_bytes
        if "native" in names and each.op is Op.ALL_GATHER and each.units > 1 and len(each.span) > 1:
            # The buffer of a gather between groups, with a part of each of the bucket's units.
            sizes["native"] = each.num_bytes * each.span[0].inner // each.span[-1].inner
        for name, size in sizes.items():
            key = name, each.stream_kind, each.span
            largest[key] = max(size, largest.get(key, 0))
    return sum(largest.values())


def _code_bytes(specs: Iterable[ShardingSpec]) -> int:
    """Count quantized bytes: of all updates, of the largest gradients, and of error feedback."""
    updates = gradients = errors = 0
    for spec in specs:
        updated = spec.collectives.get(ActionKind.PARAM_ALL_GATHER, ())
        updates += sum(each.num_bytes for each in updated if each.is_quantized)
        errors += prod(spec.grad_error_shape)
        if spec.grad_format is not None:
            sent, *gathered = (each.num_bytes for each in spec.quantized_grad_sync)
            gradients = max(gradients, _sum_bytes(sent, spec.grad_format) + sum(gathered))
    return updates + gradients + errors


def _sum_bytes(sent: int, ranges: RangeFormat) -> int:
    """Count bytes of a quantized sum: sent and received, a chunk's sum and the transformed sum."""
    return 2 * sent + 4 * 4 * ranges.numel


def _round_bytes(specs: Iterable[ShardingSpec]) -> int:
    """Count bytes that a round of outer steps takes besides model states.

    The training thread computes a movement while a comm stream sums another one and steps.
    """
    movement = step = 0
    for spec in (spec.outer_round for spec in specs if spec.buffer.trains):
        in_step = 2 * 4 * spec.layout.numel // spec.strategy.optim
        if spec.grad_format is not None:
            in_step = _sum_bytes(spec.quantized_grad_sync[0].num_bytes, spec.grad_format)
        movement, step = max(movement, 4 * spec.param_numel), max(step, in_step)
    return movement + step
