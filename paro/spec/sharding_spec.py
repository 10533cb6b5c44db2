"""The shards of a flat buffer under a strategy, and the collectives of a step's actions."""

# In: a flat buffer, a strategy, a topology and data types. Out: elements and bytes of every shard,
# and the collectives of every action. The engine allocates and sends by them, the planner counts
# them. Parameters, gradients and optimizer state each have a degree: with degree d a rank has 1 / d
# of the buffer (Note: nested shards, paro/layout.py); FSDP2 has one degree for all three. If an
# action has several collectives, each operates on the output of the one before.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from paro.collectives.schedule import Op
from paro.layout import Buffer, Unit, UnitLayout, chunk_numel
from paro.precision import BYTES_OF, PrecisionConfig
from paro.quantization.formats import (
    FULL_BITS,
    GRADIENT_BLOCK,
    UPDATE_BLOCK,
    BlockFormat,
    RangeFormat,
)
from paro.spec.outer_steps import OuterConfig
from paro.spec.states import MASTER, OptimState, adamw_states, averages, bytes_of, muon_states
from paro.step.actions import PASS_OF, ActionKind
from paro.step.slices import SliceSlot
from paro.strategy import ActionSpans, Strategy
from paro.topology import AxisSpan, Link, StreamKind, Topology, split_by_link

UINT8 = "uint8"  # the type of quantized values
_BYTES_OF = BYTES_OF | {UINT8: 1}


class Collective(NamedTuple):
    """The description of a collective: its op, axes, elements and type; nothing runs here."""

    stream_kind: StreamKind
    op: Op
    span: AxisSpan  # the axes of the rank mesh along which it runs
    numel: int  # elements of the buffer that is gathered or reduced
    dtype: str  # the type that is sent: a name of `BYTES_OF`, or UINT8
    units: int = 1  # number of equal units whose buffers are concatenated, each with its own shards

    @property
    def itemsize(self) -> int:
        return _BYTES_OF[self.dtype]

    @property
    def num_bytes(self) -> int:
        """The bytes of the unsharded buffer that is gathered or reduced, in the type sent."""
        return self.numel * self.itemsize

    @property
    def num_shards(self) -> int:
        """The number of ranks that take part, each with one shard of the buffer."""
        return self.span[-1].outer // self.span[0].inner

    @property
    def is_quantized(self) -> bool:
        return self.dtype == UINT8

    @property
    def is_exchange(self) -> bool:
        """True if the backend's own algorithm runs it, whatever runs other collectives."""
        return self.stream_kind is StreamKind.EXCHANGE


class ModelStateBytes(NamedTuple):
    """Bytes of model state that every rank holds throughout a run."""

    params: int
    grads: int
    optim: int

    @property
    def total(self) -> int:
        return sum(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardingSpec:
    """The shards of a flat buffer on every rank, their types, and the collectives of its actions.

    A frozen buffer has parameters alone: no gradients and no optimizer state.
    """

    buffer: Buffer
    strategy: Strategy  # the degrees of this buffer, which may differ from those of the run
    topology: Topology
    precision: PrecisionConfig
    outer: OuterConfig | None = None  # None: gradients are summed over all ranks in every step
    groups_alone: bool = False  # whether gradients are summed inside groups only

    @property
    def unit(self) -> Unit:
        return self.buffer.unit

    @property
    def layout(self) -> UnitLayout:
        return self.buffer.layout

    @property
    def variants(self) -> tuple[ShardingSpec, ...]:
        """The sharding specs of a run's steps: synchronous, unquantized, with groups alone."""
        whole = replace(self, groups_alone=False) if self.groups_alone else self
        exact = (whole.exact,) if self.precision.quantizes else ()
        return whole, *exact, *((whole.alone,) if self.outer is not None else ())

    @cached_property
    def exact(self) -> ShardingSpec:
        """The sharding spec of the buffer in a step that quantizes nothing."""
        if not self.precision.quantizes:
            return self
        return replace(self, precision=self.precision.with_inter_bits(FULL_BITS))

    @cached_property
    def alone(self) -> ShardingSpec:
        """The sharding spec in a step in which gradients are summed inside groups only (DiLoCo)."""
        return replace(self, groups_alone=True)

    @property
    def sum_degree(self) -> int:
        """The number of ranks over which gradients are summed."""
        return self.topology.group_size if self.groups_alone else self.topology.world_size

    @cached_property
    def spans(self) -> ActionSpans:
        """The axis spans of the actions on the buffer."""
        (params, grads, optim), between = self.strategy.degrees, self.topology.axes_between
        return ActionSpans(
            gather=between(1, params),
            reduce=between(1, grads),
            grad_shards=between(grads, optim),
            replicas=between(optim, self.sum_degree),
            param_all_gather=between(params, optim),
        )

    # States #

    @property
    def param_dtype(self) -> str:
        """The type in which parameters are held and gathered."""
        return self.precision.compute if self.buffer.trains else self.precision.frozen

    @property
    def param_numel(self) -> int:
        return self.layout.numel // self.strategy.params

    @property
    def grad_numel(self) -> int:
        """The elements of the gradient accumulator, of type `precision.accumulate`."""
        return self.layout.numel // self.strategy.grads if self.buffer.trains else 0

    @property
    def optim_degree(self) -> int:
        """The number of ranks over which optimizer state of each unit of the bucket is sharded."""
        return self.strategy.optim // self.unit.bucket_size

    @property
    def muon_stop(self) -> int:
        """The number of elements that Muon updates, which come first in the buffer."""
        by_muon = self.precision.optimizer == "muon" and self.buffer.trains
        return self.layout.matrix_stop if by_muon and self.unit.matrices else 0

    @property
    def master_is_param(self) -> bool:
        """Whether parameters in fp32 are their own masters, as they have the optimizer's degree."""
        degrees = self.strategy.params, self.strategy.optim
        return self.precision.compute == "fp32" and degrees[0] == degrees[1]

    def optimizer_numels(self, numel: int) -> dict[OptimState, int]:
        """Return the elements of each optimizer state on a rank that updates `numel` of the buffer.

        Muon's and AdamW's shares of a range differ from rank to rank: every rank allocates as much
        as the rank with the largest share of each.
        """
        stop, precision = self.muon_stop, self.precision
        in_last = max(0, min(numel, stop - (self.layout.numel - numel)))
        numels = {MASTER: 0 if self.master_is_param else numel}
        numels |= dict.fromkeys(averages(precision), numel)
        numels |= dict.fromkeys(adamw_states(precision)[1:], numel - in_last)
        return numels | dict.fromkeys(muon_states(precision)[1:], min(stop, numel))

    @property
    def state_bytes(self) -> ModelStateBytes:
        """Bytes of a rank's parameters, gradient accumulator and optimizer states.

        The optimizer range of a bucket lies in one of its units; it counts for the first unit.
        """
        return ModelStateBytes(
            self.param_numel * BYTES_OF[self.param_dtype],
            self.grad_numel * BYTES_OF[self.precision.accumulate],
            self.optimizer_bytes + self._outer_bytes,
        )

    @cached_property
    def optimizer_bytes(self) -> int:
        """Bytes of a rank's moments, averages, and masters unless parameters are their own."""
        range_numel = self.layout.numel * self.unit.bucket_size // self.strategy.optim
        numels = self.optimizer_numels(range_numel) if self.buffer.trains else {}
        return sum(numel * bytes_of([state]) for state, numel in numels.items())

    @property
    def _outer_bytes(self) -> int:
        """Bytes of the outer optimizer's states on a rank, and of a message in a round."""
        if self.outer is None or not self.buffer.trains:
            return 0
        # The anchor, maybe masters when a round begins; the reference and its momentum.
        num_copies, of_rank = (2 if self.outer.outer_delay else 1), self.outer_round.strategy.optim
        numel = num_copies * self.outer_round.param_numel + 2 * self.layout.numel // of_rank
        updates = self.outer_round.collectives[ActionKind.PARAM_ALL_GATHER]
        coded = sum(update.num_bytes for update in updates if update.is_quantized)
        return 4 * numel + self.outer_round.state_bytes.grads + coded

    def slots(self, device_type: str) -> dict[SliceSlot, tuple[int, str]]:
        """Return the elements and the type of each slot of slices, where weights rotate.

        Slices are shifted instead of gathered and reduced: each is one shard of the collective.
        """
        slots: dict[SliceSlot, tuple[int, str]] = {}
        for kind, of_slices, scratch in (
            (ActionKind.GATHER, (SliceSlot.SPARE, SliceSlot.SPARE_2), SliceSlot.SCRATCH),
            (ActionKind.REDUCE, (SliceSlot.GRAD, SliceSlot.GRAD_2), SliceSlot.GRAD_SCRATCH),
        ):
            for each in self.collectives.get(kind, ()):
                numel = each.numel // each.num_shards
                chunk = chunk_numel(numel, each.itemsize, device_type=device_type)
                slots |= dict.fromkeys(of_slices, (numel, each.dtype))
                slots[scratch] = 2 * chunk, each.dtype
        return slots

    # Quantization #

    @cached_property
    def update_format(self) -> RangeFormat | None:
        """Format of quantized updates of parameters; None if parameters are sent exactly."""
        span, bits = self.spans.param_all_gather, self.precision.inter_param_bits
        return self._quantized(span, bits, UPDATE_BLOCK, self.strategy.optim, self.param_dtype)

    @property
    def sent_param_bytes(self) -> int:
        """Bytes of a rank's copy of the parameters that all ranks have, if they are quantized."""
        numel = 0 if self.update_format is None else self.layout.numel // self.strategy.optim
        return numel * BYTES_OF[self.param_dtype]

    @cached_property
    def grad_format(self) -> RangeFormat | None:
        """Format of quantized gradients, a chunk for each rank; None if they are sent exactly."""
        size, bits = self.topology.world_size, self.precision.inter_grad_bits
        return self._quantized(
            self._grad_sync_span, bits, GRADIENT_BLOCK, size, self.precision.wire
        )

    def _quantized(
        self, span: AxisSpan, bits: int, block: int, number: int, dtype: str
    ) -> RangeFormat | None:
        """Return the format of quantized values; None if they are sent exactly or inside groups."""
        crosses = any(axis.link is Link.INTER for axis in span)
        if bits == FULL_BITS or not (crosses and self.buffer.trains):
            return None
        ranges = RangeFormat(
            form=BlockFormat(bits=bits, block=block),
            numel=self.layout.numel // number,
            slice_numel=self.layout.numel // self.layout.num_slices,
            matrix_stop=self.layout.matrix_stop,
            exact_bytes=BYTES_OF[dtype],
        )
        return ranges if ranges.range_bytes < ranges.numel * ranges.exact_bytes else None

    @property
    def _grad_sync_span(self) -> AxisSpan:
        """The axes along which gradients are summed once a step."""
        return self.spans.grad_shards + self.spans.replicas

    @property
    def grad_error_shape(self) -> tuple[int, int]:
        """Shape of the errors of quantized gradients: (number of chunk owners, bytes for each)."""
        if self.grad_format is None or not self.precision.inter_grad_error_feedback:
            return 0, 0
        _, inter = split_by_link(self._grad_sync_span)
        return self.topology.world_size // inter[0].inner, self.grad_format.error_bytes

    # Collectives #

    @cached_property
    def collectives(self) -> Mapping[ActionKind, tuple[Collective, ...]]:
        """The collectives that each action on the buffer runs, in order; none if it has no axes."""
        numel, spans = self.layout.numel, self.spans
        gather = StreamKind.GATHER, Op.ALL_GATHER, spans.gather
        reduce = StreamKind.REDUCE, Op.REDUCE_SCATTER, spans.reduce
        by_kind: dict[ActionKind, tuple[Collective, ...]] = {
            ActionKind.GATHER: (Collective(*gather, numel, self.param_dtype),)
        }
        if self.buffer.trains:
            by_kind[ActionKind.REDUCE] = (Collective(*reduce, numel, self.precision.wire),)
        if self.buffer.trains and self.unit.bucket_size:
            by_kind[ActionKind.GRAD_SYNC] = self._grad_sync()
            by_kind[ActionKind.PARAM_ALL_GATHER] = (self._param_all_gather(),)
        if self.buffer.trains and self.outer is not None:
            by_kind |= self._outer_round()
        return {kind: tuple(each for each in sent if each.span) for kind, sent in by_kind.items()}

    def sent_by(self, kind: ActionKind) -> tuple[Collective, ...]:
        """Return the collectives of an action; of a shift, the collective of its whole pass."""
        if kind not in PASS_OF:
            return self.collectives.get(kind, ())
        passes = self.collectives.get(PASS_OF[kind], ())
        return tuple(each._replace(stream_kind=StreamKind.ROTATE) for each in passes)

    @property
    def quantized_grad_sync(self) -> tuple[Collective, ...]:
        """Quantized collectives of the gradient sync: reduce-scatter, all-gather of replicas."""
        return tuple(
            each for each in self.collectives.get(ActionKind.GRAD_SYNC, ()) if each.is_quantized
        )

    def _grad_sync(self) -> tuple[Collective, ...]:
        """Return the collectives of the gradient sync; exact inside groups before quantized."""
        wire, units = self.precision.wire, self.unit.bucket_size
        numel, grads, optim = self.layout.numel * units, self.strategy.grads, self.strategy.optim
        reduce = StreamKind.REDUCE, Op.REDUCE_SCATTER
        shards, replicas = self.spans.grad_shards, self.spans.replicas
        if self.grad_format is None:
            return (
                Collective(*reduce, shards, numel // grads, wire, units),
                Collective(StreamKind.REDUCE, Op.ALL_REDUCE, replicas, numel // optim, wire),
            )
        intra, inter = split_by_link(self._grad_sync_span)
        quantized = self.grad_format.range_bytes * self.sum_degree
        return (
            Collective(*reduce, intra, numel // grads, wire),
            Collective(
                StreamKind.EXCHANGE, Op.REDUCE_SCATTER, inter, quantized // inter[0].inner, UINT8
            ),
            Collective(StreamKind.EXCHANGE, Op.ALL_GATHER, replicas, quantized // optim, UINT8),
        )

    @cached_property
    def outer_round(self) -> ShardingSpec:
        """The sharding spec of a round of outer steps (DiLoCo).

        Parameters are the anchor, gradients are the movement of the masters; both are sharded
        inside groups, and quantized if this makes the messages of both smaller.
        """
        assert self.outer is not None, "all ranks are synchronous"
        bits, topology = self.outer.outer_bits, self.topology
        group, world = topology.group_size, topology.world_size
        exact = PrecisionConfig(compute="bf16", grad_reduce_in_bf16=True)
        if bits == 32 or group == world:
            exact = PrecisionConfig(compute="fp32")
        bits = min(bits, FULL_BITS)
        sent = replace(
            self,
            strategy=Strategy(name="", params=group, grads=group, optim=world),
            precision=PrecisionConfig(compute="fp32", inter_param_bits=bits, inter_grad_bits=bits),
            outer=None,
            groups_alone=False,
        )
        has_formats = sent.grad_format is not None and sent.update_format is not None
        return sent if has_formats else replace(sent, precision=exact)

    def _outer_round(self) -> dict[ActionKind, tuple[Collective, ...]]:
        """Return the collectives of a round of outer steps: between groups, then inside them.

        Ranks of a group with the same optimizer shard each take a part of it to the round.
        """
        inside = self.topology.axes_between(self.strategy.optim, self.topology.group_size)
        numel = self.layout.numel // self.strategy.optim
        return {
            # Groups that train alone send nothing else between them: the comm streams are free.
            ActionKind.OUTER_REDUCE: self.outer_round.collectives[ActionKind.GRAD_SYNC],
            ActionKind.OUTER_GATHER: self.outer_round.collectives[ActionKind.PARAM_ALL_GATHER],
            ActionKind.OUTER_SPREAD: (
                Collective(StreamKind.GATHER, Op.ALL_GATHER, inside, numel, "fp32"),
            ),
        }

    def _param_all_gather(self) -> Collective:
        params, optim = self.strategy.params, self.strategy.optim
        gather = StreamKind.GATHER, Op.ALL_GATHER, self.spans.param_all_gather
        if self.update_format is not None:
            return Collective(*gather, self.update_format.range_bytes * optim // params, UINT8)
        units = self.unit.bucket_size
        return Collective(*gather, self.layout.numel * units // params, self.param_dtype, units)
