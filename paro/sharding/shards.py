"""Shards of a unit that a rank holds for the whole run, and their collectives once a step."""

# FSDP2 shards each parameter; here a unit's parameters are one flat buffer, and a rank holds one
# range of the buffer as `param_shard`, one as `grad_shard`. The sharding degrees of parameters,
# gradients and optimizer state may differ. The optimizer's range is inside both shards (Note:
# nested shards, paro/layout.py). Once a step:
#
#     grad_sync           grads degree -> optimizer degree, then all-reduce over replicas
#     param_all_gather    optimizer degree -> params degree, the updated parameters
#
# `ShardingSpec` describes all collectives; `UnitShards` queues them on comm streams. Subclasses add
# the collectives of a micro-batch (`ShardedUnit`: gathers and reductions, `RotatingUnit`: shifts).

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from paro.collectives.interface import CollectiveRequest, Collectives
from paro.collectives.quantized import QuantizedSum
from paro.collectives.schedule import Op
from paro.distributed.comm_stream import DONE, Event
from paro.distributed.exposed_time import ExposedTimer
from paro.layout import UnitLayout, make_whole_layout, parameter_runs
from paro.quantization.blocks import choose_kernels, split_range
from paro.quantization.formats import RangeFormat
from paro.sharding.buffers import TORCH_TYPES, BufferCounters
from paro.spec.sharding_spec import Collective, ShardingSpec
from paro.spec.states import GRAD_ERRORS, FlatShard
from paro.step.actions import ActionKind
from paro.strategy import Strategy
from paro.topology import StreamKind, Topology, WaitKind, by_units, nested_range

# (parameter's name, begin, end) -> fp32 values of the flattened elements [begin, end), on the CPU
Initializer = Callable[[str, int, int], Tensor]


@dataclass(frozen=True, slots=True)
class ShardingContext:
    """Settings and services that all units of a model share."""

    strategy: Strategy
    collectives: Collectives
    device: torch.device
    counters: BufferCounters = field(default_factory=BufferCounters)

    @property
    def topology(self) -> Topology:
        return self.collectives.groups.topology

    @property
    def rank(self) -> int:
        return self.collectives.groups.rank

    @property
    def exposed_timer(self) -> ExposedTimer:
        return self.collectives.exposed_timer


class UnitShards:
    """The flat shards of either the trainable or the frozen parameters of a unit.

    The shards stay allocated for the entire run. Subclasses define how parameters are unsharded
    and how gradients get into `grad_shard`. After an exception the unit is unusable.
    """

    def __init__(self, spec: ShardingSpec, context: ShardingContext) -> None:
        self.spec = spec
        self.name, self.layout, self.trainable = spec.buffer.name, spec.layout, spec.buffer.trains
        self.context = context
        zeros = partial(torch.zeros, device=context.device)
        self.param_shard = zeros(spec.param_numel, dtype=TORCH_TYPES[spec.param_dtype])
        accumulate = TORCH_TYPES[spec.precision.accumulate]
        self.grad_shard = zeros(spec.grad_numel, dtype=accumulate)
        # The units that share their once-a-step collectives (with Muon), and their joined shards.
        self.bucket: tuple[UnitShards, ...] = (self,)
        self._params_of_bucket, self._grads_of_bucket = self.param_shard, self.grad_shard
        self.quantized_update: QuantizedUpdate | None = None
        if spec.update_format is not None:
            (gathered,) = spec.collectives[ActionKind.PARAM_ALL_GATHER]
            quantized = zeros(gathered.numel, dtype=TORCH_TYPES[gathered.dtype])
            self.quantized_update = QuantizedUpdate(
                spec.update_format, quantized, self.param_shard, self.param_start
            )
        error_shape = spec.grad_error_shape
        self.grad_errors = zeros(error_shape, dtype=torch.uint8) if any(error_shape) else None
        self.quantized_sum = self._make_quantized_sum() if spec.quantized_grad_sync else None
        self.step_spec = spec  # the sharding spec that the present step follows
        self._fresh = True  # whether the next gradients overwrite `grad_shard` instead of adding
        self._is_quantized = False  # whether `param_all_gather` sends a quantized update next
        self._updated: Event = DONE
        self._reduced: Event = DONE

    def flat_shard(
        self,
        state: str,
        start: int,
        values: Tensor,
        *,
        degree: int,
        layout: UnitLayout | None = None,
    ) -> FlatShard:
        """Return `values` of a state as checkpoints save them: sharded over `degree` ranks.

        `layout` has the chunks in which the state exists, by default all of the unit.
        """
        topology, rank = self.context.topology, self.context.rank
        span = topology.axes_between(degree, topology.world_size)
        return FlatShard(
            layout=layout or self.layout,
            start=start,
            values=values,
            state=state,
            rank=rank,
            replicas=topology.members(span, rank),
        )

    def shard_of_errors(self, errors: Tensor) -> FlatShard:
        """Return the quantization errors of this rank's gradients, as checkpoints save them.

        Its name has world size, group size and degrees: a run with others cannot use the errors.
        """
        topology, (num_owners, length) = self.context.topology, errors.shape
        world_size, group_size = topology.world_size, topology.group_size
        degrees = "-".join(map(str, self.spec.strategy.degrees))
        name = f"{self.name}@{world_size}x{group_size}@{degrees}"
        layout = make_whole_layout({name: (world_size * num_owners, length)}, world_size=1)
        start, values = self.context.rank * errors.numel(), errors.view(-1)
        return self.flat_shard(GRAD_ERRORS, start, values, degree=world_size, layout=layout)

    # Ranges #

    @property
    def param_start(self) -> int:
        """Offset of `param_shard` in the unit's flat buffer, in elements."""
        return self.start_at(self.spec.strategy.params)

    @property
    def optim_start(self) -> int:
        """Offset of the optimizer's range in the unit's flat buffer, in elements."""
        return self.param_start + self._to_update(self.param_shard, self.spec.strategy.params).start

    def start_at(self, degree: int) -> int:
        """Return the offset of this rank's shard at a degree in the unit's flat buffer."""
        context = self.context
        return context.topology.shard_start(context.rank, degree, self.layout.numel)

    @property
    def optim_param(self) -> Tensor:
        """View of the optimizer's range of `param_shard`; empty if another group updates it."""
        return self.param_shard[self._to_update(self.param_shard, self.spec.strategy.params)]

    @property
    def optim_grad(self) -> Tensor:
        """View of the optimizer's range of `grad_shard`; empty if another group updates it."""
        return self.grad_shard[self._to_update(self.grad_shard, self.spec.strategy.grads)]

    def _to_update(self, shard: Tensor, degree: int) -> slice:
        """Return the range of the unit's shard at `degree` that this rank's optimizer updates."""
        span = self.context.topology.axes_between(degree, self.spec.strategy.optim)
        size, number = shard.numel(), self.bucket.index(self)
        order = by_units(span, len(self.bucket))
        in_bucket = nested_range(order, self.context.rank, size * len(self.bucket))
        return slice(*(min(max(0, at - number * size), size) for at in in_bucket))

    def initial_values(self, initializer: Initializer) -> Tensor:
        """Make the initial values of `param_shard`, in fp32 on the CPU."""
        start, values = self.param_start, torch.zeros(self.param_shard.numel(), dtype=torch.float32)
        for part in self.layout.chunk_ranges(start, start + values.numel()):
            position = part.offset - start
            for begin, end in parameter_runs(part.chunk, part.low, part.high):
                stop = position + end - begin
                values[position:stop] = initializer(part.chunk.name, begin, end)
                position = stop
        return values

    # Collectives #

    def queue(
        self,
        sent: Iterable[Collective],
        whole: Tensor,
        *,
        shard: Tensor | None = None,
        after: Event = DONE,
    ) -> tuple[Tensor, Event]:
        """Queue collectives on `whole`; after a reduce-scatter the next runs on this rank's shard.

        Return the buffer with the last collective's result on this rank, and the completion.
        """
        for each in sent:
            op, dtype = each.op, TORCH_TYPES[each.dtype]
            request = CollectiveRequest(
                op, whole, each.span, dtype, shard, after=after, units=each.units
            )
            local_shard = request.own(self.context.rank)
            sizes = {each.numel, whole.numel(), local_shard.numel() * each.num_shards}
            types = {dtype, whole.dtype, local_shard.dtype} if op is Op.ALL_GATHER else {dtype}
            agrees = len(sizes) == len(types) == 1 and request.stream_kind is each.stream_kind
            assert agrees, f"{self.name}: {sizes}, {types} for {each}"
            after = self.context.collectives.run(request)
            whole = local_shard if op is Op.REDUCE_SCATTER else whole
        return whole, after

    # Communication once a step #

    def quantize_update(self, master: Tensor) -> None:
        """Quantize the difference between master and parameters, and add it to the parameters."""
        assert self.quantized_update is not None, f"{self.name} is sent exactly"
        index = (self.optim_start - self.param_start) // master.numel()
        self.quantized_update.quantize(master, self.optim_param, index)
        self._is_quantized = True

    def param_all_gather(self) -> None:
        """Queue the all-gather of updated parameters: optimizer ranges fill `param_shard`.

        After `quantize_update` the quantized differences are sent and added to the parameters.
        """
        update = self.quantized_update if self._is_quantized else None
        sent = (self.spec.exact if update is None else self.spec).collectives[
            ActionKind.PARAM_ALL_GATHER
        ]
        with self.context.exposed_timer.submitting(WaitKind.PARAM_ALL_GATHER):
            whole = self._params_of_bucket if update is None else update.quantized
            _, updated = self.queue(sent, whole)
            if update is not None:
                run_after = self.context.collectives.run_after
                updated = run_after(sent[-1].span, update.apply, after=updated)
        for unit in self.bucket:
            unit._updated = updated
        self._is_quantized = False

    def wait_for_updated_params(self) -> None:
        self.context.exposed_timer.wait(WaitKind.PARAM_ALL_GATHER, self._updated)
        self._updated = DONE

    def grad_sync(self) -> None:
        """Queue the gradient sync of a bucket, behind the reductions of all micro-batches.

        Callers do so at the bucket's first unit, the last of its units that backward reaches.
        """
        spec = self.step_spec
        sent, quantized = spec.collectives[ActionKind.GRAD_SYNC], spec.quantized_grad_sync
        with self.context.exposed_timer.submitting(WaitKind.REDUCE):
            exact = (each for each in sent if each not in quantized)
            shard, reduced = self.queue(exact, self._grads_of_bucket, after=self._reduced)
            if quantized:
                assert self.quantized_sum is not None, f"{self.name} is sent quantized"
                reduced = self.quantized_sum.reduce(shard, self.optim_grad, after=reduced)
        for unit in self.bucket:
            unit._reduced, unit._fresh = reduced, True

    def _make_quantized_sum(self) -> QuantizedSum:
        """Return the quantized reduction between groups, of the sums inside groups."""
        exchange, ranges = self.spec.quantized_grad_sync, self.spec.grad_format
        assert ranges is not None, f"{self.name} is sent quantized"
        sent = [(each.stream_kind, each.op, each.numel // each.num_shards) for each in exchange]
        ops = (Op.REDUCE_SCATTER, Op.ALL_GATHER)[: len(sent)]
        planned = [(StreamKind.EXCHANGE, op, ranges.range_bytes) for op in ops]
        assert sent == planned, f"{self.name}: {sent}"
        span, *replicas = (each.span for each in exchange)
        return QuantizedSum(
            groups=self.context.collectives.groups,
            exact_dtype=TORCH_TYPES[self.spec.precision.wire],
            start=self.start_at(span[0].inner),
            ranges=ranges,
            span=span,
            replicas=tuple(chain.from_iterable(replicas)),
            errors=self.grad_errors,
        )

    def wait_reduced(self) -> None:
        self.context.exposed_timer.wait(WaitKind.REDUCE, self._reduced)
        self._reduced = DONE

    def form_bucket(self, units: Sequence[UnitShards]) -> None:
        """Make a bucket of `units`: this unit and the units after it, which have equal layouts.

        The bucket has one unit per position along the outermost axis of the step reduce-scatter.
        The ranks at a position update one unit.
        """
        bucket = (self, *units)
        params = torch.cat([unit.param_shard for unit in bucket])
        grads = torch.cat([unit.grad_shard for unit in bucket])
        both = zip(params.chunk(len(bucket)), grads.chunk(len(bucket)), strict=True)
        for unit, (param_shard, grad_shard) in zip(bucket, both, strict=True):
            unit.param_shard, unit.grad_shard = param_shard, grad_shard
            unit.bucket, unit._params_of_bucket, unit._grads_of_bucket = bucket, params, grads


@dataclass(eq=False)
class QuantizedUpdate:
    """Quantized updates of the optimizer ranges of a parameter shard, in a permanent buffer.

    `quantize` writes and applies the update of this rank's range; after the all-gather of
    `quantized`, `apply` applies the updates of the other ranges.
    """

    ranges: RangeFormat
    quantized: Tensor
    param_shard: Tensor
    start: int  # offset of the shard in the unit's flat buffer
    _local_index: int | None = None  # index of this rank's range in the shard

    def quantize(self, master: Tensor, param: Tensor, index: int) -> None:
        """Quantize the difference between the master and the parameters of this rank's range.

        The difference is added to the parameters at once, before the all-gather: copies of this
        range for checkpoints and for the node's memory wait for no other rank.
        """
        difference, exact = self._split(index)
        num_quantized = param.numel() - exact.numel()
        quantize = choose_kernels(param.device).quantize
        quantize(master[:num_quantized], self.ranges.form, difference, minus=param[:num_quantized])
        exact.copy_(master[num_quantized:])
        self._add(param, index)
        self._local_index = index

    def apply(self) -> None:
        """Add the differences of all other ranks' ranges to the parameters."""
        for index, param in enumerate(self.param_shard.view(-1, self.ranges.numel)):
            if index != self._local_index:
                self._add(param, index)

    def _add(self, param: Tensor, index: int) -> None:
        """Add the differences of a range to the parameters, and write the exact elements."""
        difference, exact = self._split(index)
        num_quantized = param.numel() - exact.numel()
        dequantize = choose_kernels(param.device).dequantize
        dequantize(difference, self.ranges.form, param[:num_quantized], adds=True)
        param[num_quantized:] = exact

    def _split(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the quantized difference and the exact elements of a range."""
        size, start = self.ranges.range_bytes, self.start + index * self.ranges.numel
        payload = self.quantized[index * size : (index + 1) * size]
        return split_range(payload, self.ranges, start, self.param_shard.dtype)
