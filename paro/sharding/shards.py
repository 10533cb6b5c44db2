"""Persistent shards of a unit's parameters and gradients, and updates of them as codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paro.collectives.coded import CodedReduction, Contribution
from paro.collectives.interface import Collectives
from paro.collectives.matrices import MatrixExchange
from paro.collectives.wire import shard_in
from paro.distributed.comm_stream import DONE, Event
from paro.distributed.exposed_time import Exposure, WaitKind
from paro.layout import PlacedBox, UnitLayout, whole_box
from paro.precision import PrecisionConfig
from paro.quantization.blocks import decode, encode, split_encoded
from paro.quantization.ranges import GRADIENT_BLOCK, UPDATE_BLOCK, RangeCodes, codes_along
from paro.sharding.buffers import GRAD_ERRORS, TORCH_TYPES, FlatShard, Ledger
from paro.step.units import Buffer
from paro.strategy import CommPlan, Strategy
from paro.topology import AxisSpan, Topology, by_units, nested_range, split_by_link


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingContext:
    """Settings and services that all units of a model share."""

    topology: Topology
    rank: int
    strategy: Strategy
    comm_plan: CommPlan
    collectives: Collectives
    device: torch.device
    precision: PrecisionConfig
    coded_reduction: CodedReduction | None = None  # if gradients have codes
    # If Muon updates matrices: by the number of ranks over which these are spread.
    matrix_exchanges: Mapping[int, MatrixExchange] = field(default_factory=dict)
    ledger: Ledger
    exposure: Exposure

    @property
    def reduce_dtype(self) -> torch.dtype:
        return TORCH_TYPES[self.precision.wire]


class UnitShards:
    """The flat shards of either the trainable or the frozen parameters of a unit.

    They stay allocated for the whole run. Subclasses define how parameters are brought to their
    use and how gradients get into `grad_shard`. After an exception the unit is unusable.
    """

    def __init__(self, buffer: Buffer, context: ShardingContext) -> None:
        self.spec = buffer.unit
        self.name, self.layout, self.trainable = buffer.name, buffer.layout, buffer.trains
        self.context = context
        strategy, numel, device = context.strategy, buffer.numel, context.device
        self.param_shard = torch.zeros(
            numel // strategy.params, dtype=param_dtype(context, self.trainable), device=device
        )
        self.grad_shard = torch.zeros(
            numel // strategy.grads if self.trainable else 0,
            dtype=TORCH_TYPES[context.precision.accumulate],
            device=device,
        )
        # Units with one step reduce-scatter and all-gather of updated parameters, and their shards.
        self.bucket: tuple[UnitShards, ...] = (self,)
        self._params_of_bucket, self._grads_of_bucket = self.param_shard, self.grad_shard
        self.coded_update = self._coded_update() if self.trainable else None
        self._grad_codes = self._codes_of_gradients() if self.trainable else None
        self.grad_errors = self._grad_errors()
        self.full_precision = False  # nothing is sent as codes in this step
        self._fresh = True  # the next gradient starts a step: overwrite instead of accumulating
        self._is_encoded = False  # what `gather_updated` sends next is `encode_update`'s
        self._updated: Event = DONE
        self._reduced: Event = DONE

    def _coded_update(self) -> CodedUpdate | None:
        context, layout = self.context, self.layout
        codes = codes_along(
            context.comm_plan.gather_updated,
            bits=context.precision.inter_param_bits,
            block=UPDATE_BLOCK,
            numel=layout.numel // context.strategy.optim,
            slice_numel=layout.numel // layout.num_slices,
            matrix_stop=layout.decayed_stop,
            uncoded_bytes=TORCH_TYPES[context.precision.compute].itemsize,
        )
        return None if codes is None else CodedUpdate(codes, self.param_shard, self.param_start)

    def _codes_of_gradients(self) -> RangeCodes | None:
        context, layout, comm_plan = self.context, self.layout, self.context.comm_plan
        return codes_along(
            (*comm_plan.step_reduce, *comm_plan.replicas),
            bits=context.precision.inter_grad_bits,
            block=GRADIENT_BLOCK,
            numel=layout.numel // context.topology.world_size,
            slice_numel=layout.numel // layout.num_slices,
            matrix_stop=layout.decayed_stop,
            uncoded_bytes=context.reduce_dtype.itemsize,
        )

    def _grad_errors(self) -> Tensor | None:
        """What codes of gradients have lost: for every owner of a piece a row of bytes."""
        context, codes = self.context, self._grad_codes
        if codes is None or not context.precision.inter_grad_error_feedback:
            return None
        assert context.coded_reduction is not None, f"{self.name} has codes"
        num_pieces = context.coded_reduction.num_pieces()
        return torch.zeros(num_pieces, codes.error_bytes, dtype=torch.uint8, device=context.device)

    def shard_of_errors(self) -> FlatShard | None:
        """What codes of gradients have lost, as checkpoints save it: no rank has another's.

        Its name says which ranks and strategy it belongs to: it means nothing to others.
        """
        if self.grad_errors is None:
            return None
        context, (num_pieces, length) = self.context, self.grad_errors.shape
        world_size, group_size = context.topology.world_size, context.topology.group_size
        degrees = "-".join(map(str, context.strategy.degrees))
        name = f"{self.name}@{world_size}x{group_size}@{degrees}"
        rows = whole_box(name, (world_size * num_pieces, length))
        return FlatShard(
            layout=UnitLayout((PlacedBox(rows, 0),), decayed_stop=0, numel=rows.numel),
            start=context.rank * self.grad_errors.numel(),
            values=self.grad_errors.view(-1),
            state=GRAD_ERRORS,
            rank=context.rank,
            replicas=(context.rank,),
        )

    # Ranges #

    @property
    def param_start(self) -> int:
        """Offset of `param_shard` in the unit's flat buffer, in elements."""
        return self._start_at(self.context.strategy.params)

    @property
    def grad_start(self) -> int:
        """Offset of `grad_shard` in the unit's flat buffer, in elements."""
        return self._start_at(self.context.strategy.grads)

    @property
    def optim_start(self) -> int:
        """Offset of the optimizer's range in the unit's flat buffer, in elements."""
        begin, _ = self._own(self.param_shard, self.context.comm_plan.gather_updated)
        return self.param_start + begin

    def _start_at(self, degree: int) -> int:
        context = self.context
        return context.topology.shard_start(context.rank, degree, self.layout.numel)

    @property
    def optim_param(self) -> Tensor:
        """The optimizer's range of `param_shard`: a view; empty if another group has the unit."""
        begin, end = self._own(self.param_shard, self.context.comm_plan.gather_updated)
        return self.param_shard[begin:end]

    @property
    def optim_grad(self) -> Tensor:
        """The optimizer's range of `grad_shard`: a view; empty if another group has the unit."""
        begin, end = self._own(self.grad_shard, self.context.comm_plan.step_reduce)
        return self.grad_shard[begin:end]

    def _own(self, shard: Tensor, span: AxisSpan) -> tuple[int, int]:
        """Where this rank's range of the bucket, at the span's fine degree, is in a shard."""
        size, number = shard.numel(), self.bucket.index(self)
        order = by_units(span, len(self.bucket))
        own = nested_range(order, self.context.rank, size * len(self.bucket))
        begin, end = (min(max(0, at - number * size), size) for at in own)
        return begin, end

    @property
    def optim_degree(self) -> int:
        """Over how many ranks its optimizer state is spread."""
        return self.context.strategy.optim // len(self.bucket)

    # Communication once a step #

    def encode_update(self, master: Tensor) -> None:
        """Makes the codes of what the master has and the parameters do not have yet."""
        assert self.coded_update is not None, f"{self.name} has no codes"
        place = (self.optim_start - self.param_start) // master.numel()
        self.coded_update.encode(master, self.optim_param, place)
        self._is_encoded = True

    def gather_updated(self) -> None:
        """Queues the all-gather of updated parameters: optimizer ranges fill `param_shard`.

        After `encode_update` it sends the codes.
        """
        span, collectives = self.context.comm_plan.gather_updated, self.context.collectives
        with self.context.exposure.submitting(WaitKind.GATHER_UPDATED):
            if not self._is_encoded:
                units = len(self.bucket)
                updated = collectives.all_gather(self._params_of_bucket, span, units=units)
                for unit in self.bucket:
                    unit._updated = updated
                return
            assert self.coded_update is not None, f"{self.name} has no codes"
            gathered = collectives.all_gather(self.coded_update.encoded, span)
            self._updated = collectives.run_after(span, self.coded_update.apply, after=gathered)
            self._is_encoded = False

    def wait_for_updated_params(self) -> None:
        self.context.exposure.wait(WaitKind.GATHER_UPDATED, self._updated)
        self._updated = DONE

    def step_reduce(self) -> None:
        """Queues the step's gradient reductions of a bucket, after those of the last micro-batch.

        Backward ends with the bucket's first unit: its own stream has reduced the others before it.
        """
        with self.context.exposure.submitting(WaitKind.REDUCE):
            reduced = self._sum_over_world(self._reduced)
        for unit in self.bucket:
            unit._reduced, unit._fresh = reduced, True

    def _sum_over_world(self, event: Event) -> Event:
        """Queues, after `event`, the step's gradient reduce-scatter and replica all-reduce."""
        context, comm_plan = self.context, self.context.comm_plan
        collectives, comm_dtype = context.collectives, context.reduce_dtype
        if self._grad_codes is not None and not self.full_precision:
            assert context.coded_reduction is not None, f"{self.name} has codes"
            intra, _ = split_by_link((*comm_plan.step_reduce, *comm_plan.replicas))
            event = collectives.reduce_scatter(self.grad_shard, intra, comm_dtype, after=event)
            begin, end = nested_range(intra, context.rank, self.grad_shard.numel())
            gradients = Contribution(
                values=self.grad_shard[begin:end],
                start=self.grad_start + begin,
                codes=self._grad_codes,
                errors=self.grad_errors,
            )
            return context.coded_reduction.reduce(gradients, self.optim_grad, after=event)
        span, grads = comm_plan.step_reduce, self._grads_of_bucket
        units = len(self.bucket)
        event = collectives.reduce_scatter(grads, span, comm_dtype, after=event, units=units)
        own = shard_in(grads, by_units(span, units), context.rank)
        return collectives.all_reduce(own, comm_plan.replicas, comm_dtype, after=event)

    def wait_reduced(self) -> None:
        self.context.exposure.wait(WaitKind.REDUCE, self._reduced)
        self._reduced = DONE

    def lead(self, units: Sequence[UnitShards]) -> None:
        """Makes one bucket of this unit and those that follow it, which are laid out alike.

        There are as many as positions along the outermost axis of the step reduce-scatter. The
        ranks at each position update one of them.
        """
        bucket = (self, *units)
        params = torch.cat([unit.param_shard for unit in bucket])
        grads = torch.cat([unit.grad_shard for unit in bucket])
        both = zip(params.chunk(len(bucket)), grads.chunk(len(bucket)), strict=True)
        for unit, (param_shard, grad_shard) in zip(bucket, both, strict=True):
            unit.param_shard, unit.grad_shard = param_shard, grad_shard
            unit.bucket, unit._params_of_bucket, unit._grads_of_bucket = bucket, params, grads


def param_dtype(context: ShardingContext, trainable: bool) -> torch.dtype:
    """The type in which parameters that train, or frozen ones, are held and gathered."""
    precision = context.precision
    return TORCH_TYPES[precision.compute if trainable else precision.frozen]


class CodedUpdate:
    """The encoded optimizer ranges of a parameter shard, and their buffer, which stays allocated.

    `encode` writes this rank's range and applies it; after the all-gather of `encoded`, `apply`
    changes the others.
    """

    def __init__(self, codes: RangeCodes, param_shard: Tensor, start: int) -> None:
        self._codes = codes
        self._param_shard = param_shard
        self._start = start  # of the shard in the unit's flat buffer
        self._own: int | None = None  # the place of this rank's range
        num_ranges = param_shard.numel() // codes.numel
        self.encoded = torch.zeros(
            num_ranges * codes.range_bytes, dtype=torch.uint8, device=param_shard.device
        )

    def encode(self, master: Tensor, param: Tensor, place: int) -> None:
        """Encodes the difference between the master and the parameters of this rank's range.

        The parameters have it at once, and not after the all-gather: copies of this range for
        checkpoints and for the node's memory wait for no other rank.
        """
        codes, uncoded = self._parts(place)
        coded = self._codes.num_coded(self._range_start(place))
        encode(master[:coded], self._codes.form, codes, minus=param[:coded])
        uncoded.copy_(master[coded:])
        self._add(param, place)
        self._own = place

    def apply(self) -> None:
        """Adds the decoded differences of all other ranges to the parameters."""
        for place, param in enumerate(self._param_shard.view(-1, self._codes.numel)):
            if place != self._own:
                self._add(param, place)

    def _add(self, param: Tensor, place: int) -> None:
        """Adds what range `place` has as codes, and writes what it has exactly."""
        codes, uncoded = self._parts(place)
        coded = self._codes.num_coded(self._range_start(place))
        decode(codes, self._codes.form, param[:coded], adds=True)
        param[coded:] = uncoded

    def _range_start(self, place: int) -> int:
        return self._start + place * self._codes.numel

    def _parts(self, place: int) -> tuple[Tensor, Tensor]:
        """The bytes of scales and codes of a range, and its uncoded elements."""
        size = self._codes.range_bytes
        payload = self.encoded[place * size : (place + 1) * size]
        start = self._range_start(place)
        return split_encoded(payload, self._codes, start, self._param_shard.dtype)
