"""The description of a run for engine and planner: all that decides memory, traffic and actions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from model.config import LlamaConfig, RecomputeConfig, loss_chunk
from paro.collectives.choice import AlgorithmChoice, needed_groups
from paro.collectives.schedule import Op
from paro.layout import Unit, buffers_of
from paro.precision import BYTES_OF, PrecisionConfig
from paro.spec.context_layout import ALONE, ContextLayout
from paro.spec.muon_rounds import muon_rounds
from paro.spec.optim_config import MuonConfig
from paro.spec.outer_steps import OuterConfig
from paro.spec.sharding_spec import Collective, ShardingSpec
from paro.step.actions import PASS_OF, ActionKind
from paro.strategy import Strategy
from paro.topology import COLLECTIVE_STREAMS, AxisSpan, Spans, StreamKind, Topology, make_topology


class Materialize(Enum):
    """The way in which parameters reach the ranks that compute with them."""

    GATHER = "gathered"
    ROTATE = "rotated"
    ROTATE_IN_PLACE = "rotated in place"

    @classmethod
    def of_flags(cls, materialize: str, rotate_in_place: bool) -> Materialize:
        """Return the member that --paro-materialize and --paro-rotate-in-place select."""
        if materialize == "gather":
            return cls.GATHER
        return cls.ROTATE_IN_PLACE if rotate_in_place else cls.ROTATE

    @property
    def rotates(self) -> bool:
        return self is not Materialize.GATHER

    @property
    def in_place(self) -> bool:
        return self is Materialize.ROTATE_IN_PLACE


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The settings of a run by its flags; the planner may choose others for some of them."""

    model: LlamaConfig
    group_size: int  # the number of ranks with fast links, which is the degree of letter I
    context: ContextLayout = ALONE  # the layout of the context-parallel group
    seq_length: int
    apart: bool = False  # whether attention stays within each document of a sample
    micro_batch_size: int
    precision: PrecisionConfig
    muon: MuonConfig = field(default_factory=MuonConfig)
    prefetch_units: int = 1
    updated_ahead: int | None = None  # units ahead of which updates are gathered; None: all at once
    outer: OuterConfig | None = None  # outer steps between groups; None: ranks are synchronous
    collective: str = "native"
    materialize: Materialize = Materialize.GATHER
    device_type: str = "cuda"  # or "cpu"; decides the kernels that exist
    eval_micro_batch_size: int = 0  # samples; 0: as in training, or without evaluation
    eval_ema: bool = False  # whether evaluations have averaged weights too
    copy_engine: bool = False  # whether unsharded parameters stay in registered memory

    @property
    def rotated(self) -> LlamaConfig | None:
        """The model if its weights rotate; None if they are gathered."""
        return self.model if self.materialize.rotates else None

    @property
    def can_offload(self) -> bool:
        """True if --optimizer-cpu-offload would free device memory and is not given."""
        adamw = self.precision.optimizer == "adam" and not self.precision.optimizer_cpu_offload
        return adamw and self.outer is None and self.device_type == "cuda"


class ContextLimits(NamedTuple):
    """Limits of a run's context-parallel layouts on a number of ranks."""

    run: RunSettings
    world_size: int

    @property
    def no_log_sum_exp(self) -> str | None:
        """The reason why attention returns none, which a ring needs; None if it returns one."""
        return self.run.model.why_no_log_sum_exp(self.run.device_type, self.run.precision.compute)

    @property
    def most(self) -> int:
        """The most ranks that may share a sample."""
        if self.run.materialize.rotates:
            return 1
        return self.world_size if self.run.outer is None else self.run.group_size

    def reason_invalid(self, layout: ContextLayout) -> str | None:
        """Say why a layout cannot divide a sample, as text after a colon; None if it can."""
        run, size, heads, group_size = self.run, layout.size, layout.heads, self.run.group_size
        num_heads, num_kv_heads = run.model.num_attention_heads, run.model.num_query_groups
        if size == 1:
            return None
        if run.materialize.rotates:
            return (
                "with --paro-materialize rotate ranks of a ring have different heads at a time, "
                "which cannot be exchanged"
            )
        if size > self.most:
            return (
                f"with --paro-outer-steps groups of {group_size} ranks train alone, and it shares "
                "a sample between groups"
            )
        if layout.ring > 1 and self.no_log_sum_exp is not None:
            return self.no_log_sum_exp
        if self.world_size % size:
            return f"it does not divide the {self.world_size} ranks"
        for part in (size, heads, layout.inner or size):
            if part % group_size and group_size % part:
                return f"{part} ranks and groups of {group_size} do not divide one another"
        if run.seq_length % (2 * size):
            return (
                f"--seq-length {run.seq_length} is no multiple of {2 * size}, two parts for each "
                "rank"
            )
        if num_heads % heads:
            return f"{num_heads} heads cannot be exchanged among {heads} ranks"
        if num_kv_heads % heads and heads % num_kv_heads:
            return (
                f"{num_kv_heads} heads of keys and values cannot be exchanged among {heads} "
                "ranks: one number must divide the other"
            )
        return None


@dataclass(frozen=True, kw_only=True)
class RunSpec(RunSettings):
    """The description of a run: all that decides a rank's memory and traffic, save the machine."""

    trained: frozenset[str]  # the names of the parameters that train
    recompute: RecomputeConfig | None  # the recomputation, which replaces that of `model`
    world_size: int
    strategy: Strategy
    num_micro_batches: int  # the largest number of micro-batches in a step

    @property
    def units_kind(self) -> tuple[object, ...]:
        """The part of the description that decides the units and their flat buffers."""
        rotated_over = self.strategy.params if self.materialize.rotates else 1
        return self.world_size, self.trained, self.bucket_size, self.materialize, rotated_over

    @property
    def step_kind(self) -> tuple[object, ...]:
        """The part of the description that decides the actions of a step."""
        params, grads, _ = self.strategy.degrees
        return *self.units_kind, self.recompute, params > 1, grads > 1

    @property
    def states_kind(self) -> tuple[object, ...]:
        """The part of the description that decides the shards of all states."""
        degrees = self.strategy.degrees
        return self.world_size, degrees, self.materialize, self.trained, self.precision

    @property
    def bucket_size(self) -> int:
        """The number of units in a bucket, sharded over fewer ranks together; 1 without Muon."""
        has_buckets = self.precision.optimizer == "muon" and not self.precision.quantizes
        degree = max(self.strategy.params, self.strategy.grads, self.group_size)
        return max(1, self.strategy.optim // degree) if has_buckets else 1

    @property
    def overlaps(self) -> bool:
        """True if anything is sent while the training thread computes."""
        return self.prefetch_units > 0

    @property
    def config(self) -> LlamaConfig:
        """The model's configuration, with the recomputation of the run."""
        return replace(self.model, recompute=self.recompute)

    @cached_property
    def topology(self) -> Topology:
        return make_topology(
            world_size=self.world_size, group_size=self.group_size, degrees=self.strategy.degrees
        )

    def specs(self, units: Iterable[Unit]) -> list[ShardingSpec]:
        """Compute the sharding specs of the buffers of the run's units, by buffer number."""
        strategy, replicated = self.strategy, replace(self.strategy, params=1, grads=1)
        return [
            ShardingSpec(
                buffer=buffer,
                strategy=replicated if buffer.unit.replicated else strategy,
                topology=self.topology,
                precision=self.precision,
                outer=self.outer,
            )
            for buffer in buffers_of(units)
        ]

    @cached_property
    def context_topology(self) -> Topology:
        """The axes of the context-parallel groups."""
        return self.context.topology(world_size=self.world_size, group_size=self.group_size)

    @property
    def compute_bytes(self) -> int:
        """The bytes per element of the compute type."""
        return BYTES_OF[self.precision.compute]

    @property
    def num_tokens(self) -> int:
        """The number of tokens of a micro-batch on one rank."""
        return self.micro_batch_size * self.seq_length // self.context.size

    def tensor_bytes(self, width: int) -> int:
        """Compute the bytes of a tensor of `width` elements per token in the compute type."""
        return self.num_tokens * width * self.compute_bytes

    @property
    def fuses_loss(self) -> bool:
        """True if Triton makes gradients of logits in place, as it is expected to on a GPU."""
        return self.model.fuses_loss or self.device_type == "cuda"

    @property
    def loss_chunk(self) -> int:
        """The number of tokens whose logits the loss computes at a time, at most."""
        size = loss_chunk(self.model.vocab_size, self.compute_bytes, fused=self.fuses_loss)
        return min(self.num_tokens, size)


class RunGroups(NamedTuple):
    """The axis spans of a run's process groups."""

    states: Spans  # for model states, on the topology of the run
    context: Spans  # for context parallelism, on the topology of the context layout

    @property
    def number(self) -> int:
        """The number of process groups that have a rank."""
        return sum(map(len, chain(self.states.values(), self.context.values())))


def groups_of(run: RunSpec, specs: Sequence[ShardingSpec], choice: AlgorithmChoice) -> RunGroups:
    """Return the process groups of a run, for its buffers and its algorithms of collectives.

    They serve all kinds of steps: in the first nothing is quantized, and ranks are synchronous.
    """
    spans: defaultdict[StreamKind, set[AxisSpan]] = defaultdict(set)
    for variant in zip(*(spec.variants for spec in specs), strict=True):
        for sent in collectives_of(run, variant):
            if sent.is_exchange and sent.op is Op.ALL_GATHER:
                spans[sent.stream_kind].update((axis,) for axis in sent.span)
            else:
                spans[sent.stream_kind].add(sent.span)
    spans[StreamKind.EXCHANGE].update(rounds.span(run.topology) for rounds in muon_rounds(specs))
    along = {kind: frozenset(filter(None, of_kind)) for kind, of_kind in spans.items()}
    by_algorithms = {kind: along.pop(kind, frozenset()) for kind in COLLECTIVE_STREAMS}
    return RunGroups(
        states={**along, **needed_groups(choice, by_algorithms)},
        context=run.context.groups(run.context_topology, choice),
    )


def collectives_of(run: RunSpec, specs: Iterable[ShardingSpec]) -> set[Collective]:
    """Return the different collectives of a step; a pass of shifts counts as its collective."""
    others = {*PASS_OF.values()} if run.materialize.rotates else {*PASS_OF}
    kinds = {*ActionKind} - others
    return {sent for spec in {*specs} for kind in kinds for sent in spec.sent_by(kind)}
