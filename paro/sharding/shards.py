"""Persistent shards of a unit's parameters and gradients, and updates of them as codes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from paro.collectives.coded import CodedReduction, Contribution
from paro.collectives.interface import Collectives, Request
from paro.collectives.matrices import MatrixExchange
from paro.collectives.schedule import Op
from paro.distributed.comm_stream import DONE, Event
from paro.distributed.exposed_time import Exposure, WaitKind
from paro.layout import PlacedChunk, UnitLayout, whole_chunk
from paro.quantization.blocks import decode, encode, split_encoded
from paro.quantization.ranges import RangeCodes
from paro.sharding.buffers import TORCH_TYPES, Ledger
from paro.spec.sharding_spec import Collective, ShardingSpec
from paro.spec.states import GRAD_ERRORS, FlatShard
from paro.step.actions import Verb
from paro.strategy import Strategy
from paro.topology import StreamKind, Topology, by_units, nested_range


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingContext:
    """Settings and services that all units of a model share."""

    topology: Topology
    rank: int
    strategy: Strategy
    collectives: Collectives
    device: torch.device
    coded_reduction: CodedReduction | None = None  # if gradients have codes
    # If Muon updates matrices: by the number of ranks over which these are sharded.
    matrix_exchanges: Mapping[int, MatrixExchange] = field(default_factory=dict)
    ledger: Ledger
    exposure: Exposure


class UnitShards:
    """The flat shards of either the trainable or the frozen parameters of a unit.

    They stay allocated for the whole run. Subclasses define how parameters are brought to their
    use and how gradients get into `grad_shard`. After an exception the unit is unusable.
    """

    def __init__(self, spec: ShardingSpec, context: ShardingContext) -> None:
        self.spec = spec
        self.name, self.layout, self.trainable = spec.buffer.name, spec.layout, spec.buffer.trains
        self.context = context
        zeros = partial(torch.zeros, device=context.device)
        self.param_shard = zeros(spec.param_numel, dtype=TORCH_TYPES[spec.param_dtype])
        accumulate = TORCH_TYPES[spec.precision.accumulate]
        self.grad_shard = zeros(spec.grad_numel, dtype=accumulate)
        # Units with one step reduce-scatter and all-gather of updated parameters, and their shards.
        self.bucket: tuple[UnitShards, ...] = (self,)
        self._params_of_bucket, self._grads_of_bucket = self.param_shard, self.grad_shard
        self.coded_update: CodedUpdate | None = None
        if spec.update_codes is not None:
            (gathered,) = spec.collectives[Verb.PARAM_ALL_GATHER]
            encoded = zeros(gathered.numel, dtype=TORCH_TYPES[gathered.dtype])
            self.coded_update = CodedUpdate(
                spec.update_codes, encoded, self.param_shard, self.param_start
            )
        lost = spec.grad_error_bytes
        self.grad_errors = zeros(lost, dtype=torch.uint8) if any(lost) else None
        self.full_precision = False  # nothing is sent as codes in this step
        self._fresh = True  # the next gradient starts a step: overwrite instead of accumulating
        self._is_encoded = False  # what `start_param_all_gather` sends next is `encode_update`'s
        self._updated: Event = DONE
        self._reduced: Event = DONE

    def shard_of_errors(self) -> FlatShard | None:
        """What codes of gradients have lost, as checkpoints save it: no rank has another's.

        Its name says which ranks and strategy it belongs to: it means nothing to others.
        """
        if self.grad_errors is None:
            return None
        context, (num_pieces, length) = self.context, self.grad_errors.shape
        world_size, group_size = context.topology.world_size, context.topology.group_size
        degrees = "-".join(map(str, self.spec.strategy.degrees))
        name = f"{self.name}@{world_size}x{group_size}@{degrees}"
        rows = whole_chunk(name, (world_size * num_pieces, length))
        return FlatShard(
            layout=UnitLayout((PlacedChunk(rows, 0),), decayed_stop=0, numel=rows.numel),
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
        return self._start_at(self.spec.strategy.params)

    @property
    def grad_start(self) -> int:
        """Offset of `grad_shard` in the unit's flat buffer, in elements."""
        return self._start_at(self.spec.strategy.grads)

    @property
    def optim_start(self) -> int:
        """Offset of the optimizer's range in the unit's flat buffer, in elements."""
        begin, _ = self._own(self.param_shard, self.spec.strategy.params)
        return self.param_start + begin

    def _start_at(self, degree: int) -> int:
        context = self.context
        return context.topology.shard_start(context.rank, degree, self.layout.numel)

    @property
    def optim_param(self) -> Tensor:
        """The optimizer's range of `param_shard`: a view; empty if another group has the unit."""
        begin, end = self._own(self.param_shard, self.spec.strategy.params)
        return self.param_shard[begin:end]

    @property
    def optim_grad(self) -> Tensor:
        """The optimizer's range of `grad_shard`: a view; empty if another group has the unit."""
        begin, end = self._own(self.grad_shard, self.spec.strategy.grads)
        return self.grad_shard[begin:end]

    def _own(self, shard: Tensor, degree: int) -> tuple[int, int]:
        """Where this rank's optimizer range of the bucket is in a shard at a degree."""
        span = self.context.topology.axes_between(degree, self.spec.strategy.optim)
        size, number = shard.numel(), self.bucket.index(self)
        order = by_units(span, len(self.bucket))
        own = nested_range(order, self.context.rank, size * len(self.bucket))
        begin, end = (min(max(0, at - number * size), size) for at in own)
        return begin, end

    @property
    def optim_degree(self) -> int:
        """Over how many ranks its optimizer state is spread."""
        return self.bucket[0].spec.optim_degree

    # Collectives #

    def _queue(
        self,
        sent: Iterable[Collective],
        whole: Tensor,
        *,
        shard: Tensor | None = None,
        after: Event = DONE,
    ) -> tuple[Tensor, Event]:
        """Queue collectives, each on what the one before has left on this rank of `whole`.

        Returns what the last one leaves there.
        """
        for one in sent:
            dtype = TORCH_TYPES[one.dtype]
            request = Request(one.op, whole, one.span, dtype, shard, after=after, units=one.units)
            own = request.own(self.context.rank)
            sizes = {one.numel, whole.numel(), own.numel() * one.num_shards}
            types = {dtype, whole.dtype, own.dtype} if one.op is Op.ALL_GATHER else {dtype}
            found = len(sizes), len(types), request.stream_kind
            assert found == (1, 1, one.stream_kind), f"{self.name}: {sizes}, {types} for {one}"
            after = self.context.collectives.run(request)
            whole = own if one.op is Op.REDUCE_SCATTER else whole
        return whole, after

    # Communication once a step #

    def encode_update(self, master: Tensor) -> None:
        """Make the codes of what the master has and the parameters do not have yet."""
        assert self.coded_update is not None, f"{self.name} has no codes"
        place = (self.optim_start - self.param_start) // master.numel()
        self.coded_update.encode(master, self.optim_param, place)
        self._is_encoded = True

    def start_param_all_gather(self) -> None:
        """Queue the all-gather of updated parameters: optimizer ranges fill `param_shard`.

        After `encode_update` it sends the codes.
        """
        coded = self.coded_update if self._is_encoded else None
        sent = (self.spec.exact if coded is None else self.spec).collectives[Verb.PARAM_ALL_GATHER]
        with self.context.exposure.submitting(WaitKind.PARAM_ALL_GATHER):
            if coded is None:
                _, updated = self._queue(sent, self._params_of_bucket)
            else:
                _, gathered = self._queue(sent, coded.encoded)
                run_after = self.context.collectives.run_after
                updated = run_after(sent[-1].span, coded.apply, after=gathered)
        for unit in self.bucket:
            unit._updated = updated
        self._is_encoded = False

    def wait_for_updated_params(self) -> None:
        self.context.exposure.wait(WaitKind.PARAM_ALL_GATHER, self._updated)
        self._updated = DONE

    def start_grad_sync(self) -> None:
        """Queue the step's gradient reductions of a bucket, after those of the last micro-batch.

        Backward ends with the bucket's first unit: its own stream has reduced the others before it.
        """
        spec = self.spec.exact if self.full_precision else self.spec
        sent, encoded = spec.collectives[Verb.GRAD_SYNC], spec.exchange
        with self.context.exposure.submitting(WaitKind.REDUCE):
            own, reduced = self._queue(
                (one for one in sent if one not in encoded),
                self._grads_of_bucket,
                after=self._reduced,
            )
            if encoded:
                reduced = self._exchange(own, encoded, reduced)
        for unit in self.bucket:
            unit._reduced, unit._fresh = reduced, True

    def _exchange(self, gradients: Tensor, encoded: Sequence[Collective], event: Event) -> Event:
        """Queues, after `event`, the sum between groups of what each group has summed."""
        exchange, codes = self.context.coded_reduction, self.spec.grad_codes
        assert exchange is not None, f"{self.name} has codes"
        assert codes is not None, f"{self.name} sends codes"
        span, *replicas = (one.span for one in encoded)
        sent = [(one.stream_kind, one.op, one.numel // one.num_shards) for one in encoded]
        ops = (Op.REDUCE_SCATTER, Op.ALL_GATHER)[: len(sent)]
        assert sent == [(StreamKind.EXCHANGE, op, codes.range_bytes) for op in ops], (
            f"{self.name}: {sent}"
        )
        contribution = Contribution(
            values=gradients,
            start=self._start_at(span[0].inner),
            codes=codes,
            span=span,
            replicas=tuple(chain.from_iterable(replicas)),
            errors=self.grad_errors,
        )
        return exchange.reduce(contribution, self.optim_grad, after=event)

    def wait_reduced(self) -> None:
        self.context.exposure.wait(WaitKind.REDUCE, self._reduced)
        self._reduced = DONE

    def form_bucket(self, units: Sequence[UnitShards]) -> None:
        """Make one bucket of this unit and the units after it, whose layouts are equal.

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


class CodedUpdate:
    """The encoded optimizer ranges of a parameter shard, and their buffer, which stays allocated.

    `encode` writes this rank's range and applies it; after the all-gather of `encoded`, `apply`
    changes the others.
    """

    def __init__(self, codes: RangeCodes, encoded: Tensor, param_shard: Tensor, start: int) -> None:
        self.encoded = encoded
        self._codes = codes
        self._param_shard = param_shard
        self._start = start  # of the shard in the unit's flat buffer
        self._own: int | None = None  # the place of this rank's range

    def encode(self, master: Tensor, param: Tensor, place: int) -> None:
        """Encode the difference between the master and the parameters of this rank's range.

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
        """Add the decoded differences of all other ranges to the parameters."""
        for place, param in enumerate(self._param_shard.view(-1, self._codes.numel)):
            if place != self._own:
                self._add(param, place)

    def _add(self, param: Tensor, place: int) -> None:
        """Add what range `place` has as codes, and write what it has exactly."""
        codes, uncoded = self._parts(place)
        coded = self._codes.num_coded(self._range_start(place))
        decode(codes, self._codes.form, param[:coded], adds=True)
        param[coded:] = uncoded

    def _range_start(self, place: int) -> int:
        return self._start + place * self._codes.numel

    def _parts(self, place: int) -> tuple[Tensor, Tensor]:
        """Return the bytes of scales and codes of a range, and its uncoded elements."""
        size = self._codes.range_bytes
        payload = self.encoded[place * size : (place + 1) * size]
        start = self._range_start(place)
        return split_encoded(payload, self._codes, start, self._param_shard.dtype)
