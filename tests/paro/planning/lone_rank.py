"""One rank without peers: it allocates memory and counts bytes as usual, and sends nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from model.config import LlamaConfig
from model.llama import Llama
from paro.collectives import wire
from paro.collectives.choice import AlgorithmChoice, Pieces
from paro.collectives.coded import CodedReduction
from paro.collectives.flat import FlatCollectives
from paro.collectives.interface import Collectives
from paro.collectives.matrices import MatrixExchange
from paro.collectives.native import NativeCollectives
from paro.collectives.pipelined import PipelinedCollectives
from paro.collectives.shifts import Ring
from paro.context_parallel.attention import make_context_attention
from paro.context_parallel.gather import make_gather
from paro.context_parallel.layout import ContextLayout
from paro.context_parallel.partwise import Travel
from paro.context_parallel.ring import make_rings
from paro.distributed.byte_counter import ByteCounter, Sent
from paro.distributed.comm_stream import InlineStreams
from paro.distributed.exposed_time import Exposure
from paro.distributed.groups import Groups
from paro.distributed.links import Links
from paro.distributed.timers import Timers
from paro.distributed.world import World
from paro.optim.muon_config import MuonConfig
from paro.optim.optimizer import OptimConfig, ParoOptimizer
from paro.planning.cost_model import in_buckets, muon_rounds
from paro.planning.units import units_of
from paro.precision import PrecisionConfig
from paro.rotation.partition import cut_into_parts
from paro.rotation.rotated_model import RotatedModel
from paro.sharding.buffers import Ledger
from paro.sharding.distributed_model import DistributedModel
from paro.sharding.sharded_model import ShardedModel
from paro.sharding.shards import ShardingContext
from paro.sharding.wrap import make_unit_modules
from paro.strategy import Strategy, make_comm_plan
from paro.topology import Topology, Use

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class NoGroups(Groups):
    """Process groups without processes."""

    def of(self, use: object, span: object) -> None:  # type: ignore[override]
        return None


def silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes torch.distributed leave buffers unchanged; gathered ones are filled with zeros."""

    def gather(whole: Tensor, shard: Tensor, group: None) -> None:
        whole.zero_()

    def transfer(op: object, tensor: Tensor, *_: object) -> None:
        if op is wire.dist.irecv:
            tensor.zero_()

    monkeypatch.setattr(wire.dist, "P2POp", transfer)
    monkeypatch.setattr(wire.dist, "batch_isend_irecv", lambda transfers: [])
    monkeypatch.setattr(wire, "_all_gather", gather)
    monkeypatch.setattr(wire, "_reduce_scatter", lambda own, whole, group: None)
    monkeypatch.setattr(wire.dist, "all_reduce", lambda whole, group: None)
    monkeypatch.setattr(wire.dist, "all_to_all_single", lambda received, sent, group: None)
    monkeypatch.setattr(wire.dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(Groups, "of", lambda *_: None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoneRank:
    """The model and the optimizer of one rank."""

    config: LlamaConfig
    model: DistributedModel
    optimizer: ParoOptimizer
    traffic: ByteCounter

    def share_samples(self, layout: ContextLayout) -> None:
        """From now on attention is that of the first of ranks that share samples.

        The last one of a ring, whose queries see half of all other keys, allocates less.
        """
        context, topology = self.model.context, self.model.context.topology
        world = World(size=topology.world_size, group=topology.group_size)
        links = Links(InlineStreams(), self.traffic, context.exposure)
        travel: Travel | None = None
        if layout.gathers:
            travel = make_gather(layout, world, links, AlgorithmChoice(names=("native",)))
        elif layout.ring > 1:
            travel = make_rings(layout, world, links)
        assert isinstance(self.model.model, Llama)
        self.model.model.core = make_context_attention(layout, world, links, travel, "auto")

    def step(self, num_micro_batches: int, *, size: int = 1, seq_length: int = 16) -> Sent:
        """Trains one step on made-up tokens; returns the bytes that the rank would have sent."""
        device = self.model.units[0].param_shard.device
        tokens_BS = torch.zeros(size, seq_length, dtype=torch.int64, device=device)
        weights_BS = torch.ones(size, seq_length, device=device)
        self.model.begin_step(num_micro_batches)
        for index in range(num_micro_batches):
            last = index + 1 == num_micro_batches
            self.model.forward_backward(tokens_BS, tokens_BS, weights_BS, last=last)
        self.model.finish_gradients()
        sent = self.traffic.take()
        self.optimizer.step(lr=0.0, weight_decay=0.0, grad_norm=1.0, unscale=0.5)
        return sent


def lone_rank(
    config: LlamaConfig,
    strategy: Strategy,
    topology: Topology,
    precision: PrecisionConfig,
    *,
    units_ahead: tuple[int, int | None] = (1, None),
    device: str = "cpu",
    is_trained: Callable[[str], bool] = lambda _name: True,
) -> LoneRank:
    """Builds the last rank as training does; call `silence` before it runs.

    `units_ahead`: of gathers, and of updated parameters' all-gathers.
    """
    context, dealt = _context(strategy, topology, precision, device), None
    if precision.optimizer == "muon":
        units = units_of(config, world_size=topology.world_size, is_trained=is_trained)
        units = in_buckets(units, strategy, precision)
        dealt = {unit.name: unit.dealt for unit in units}
        groups = NoGroups(topology=topology, rank=context.rank, _by_use_and_span={})
        exchanges = {
            places.degree: MatrixExchange(
                groups, Links(InlineStreams()), topology.axes_between(1, places.number)
            )
            for places in muon_rounds(units, strategy, precision, topology.group_size)
        }
        context = replace(context, matrix_exchanges=exchanges)
    llama = _empty_llama(config, precision, is_trained)
    nodes = make_unit_modules(llama, llama.units(), context, dealt)
    model = ShardedModel(
        llama, nodes, Timers(), prefetch_units=units_ahead[0], updated_ahead=units_ahead[1]
    )
    return _lone(config, model, precision)


def lone_pipelining_rank(
    config: LlamaConfig,
    strategy: Strategy,
    topology: Topology,
    precision: PrecisionConfig,
    pieces: Pieces,
    *,
    is_trained: Callable[[str], bool] = lambda _name: True,
) -> LoneRank:
    """The same with ho-ring's pipelines."""
    context = _context(strategy, topology, precision, "cpu", pieces)
    llama = _empty_llama(config, precision, is_trained)
    nodes = make_unit_modules(llama, llama.units(), context)
    return _lone(config, ShardedModel(llama, nodes, Timers(), prefetch_units=1), precision)


def lone_flat_rank(
    config: LlamaConfig, strategy: Strategy, topology: Topology, precision: PrecisionConfig
) -> LoneRank:
    """The same with flat collectives, and sums of gradients as codes between groups."""
    context = _context(strategy, topology, precision, "cpu")
    groups = NoGroups(topology=topology, rank=context.rank, _by_use_and_span={})
    flat = FlatCollectives(groups, Links(InlineStreams()))
    coded = CodedReduction(
        groups, Links(InlineStreams()), context.comm_plan, uncoded_dtype=context.reduce_dtype
    )
    llama = _empty_llama(config, precision, lambda _name: True)
    context = replace(
        context,
        collectives=flat,
        inter_grad_bits=precision.inter_grad_bits,
        coded_reduction=coded,
    )
    nodes = make_unit_modules(llama, llama.units(), context)
    return _lone(config, ShardedModel(llama, nodes, Timers(), prefetch_units=1), precision)


def lone_rotating_rank(
    config: LlamaConfig,
    strategy: Strategy,
    topology: Topology,
    precision: PrecisionConfig,
    *,
    in_place: bool,
    updated_ahead: int | None = None,
    is_trained: Callable[[str], bool] = lambda _name: True,
) -> LoneRank:
    """The same with rotation."""
    context = _context(strategy, topology, precision, "cpu")
    llama = _empty_llama(config, precision, is_trained)
    collectives = context.collectives
    assert isinstance(collectives, NativeCollectives)
    span = topology.axes_between(1, strategy.params)
    groups = NoGroups(topology=topology, rank=context.rank, _by_use_and_span={})
    ring = Ring(Use.ROTATE, span, groups, Links(InlineStreams(), collectives._wire._traffic))
    parts = cut_into_parts(llama, llama.units(), context, ring, in_place=in_place)
    model = RotatedModel(llama, parts, ring, Timers(), updated_ahead=updated_ahead)
    return _lone(config, model, precision)


def _context(
    strategy: Strategy,
    topology: Topology,
    precision: PrecisionConfig,
    device: str,
    pieces: Pieces | None = None,
) -> ShardingContext:
    rank = topology.world_size - 1
    groups = NoGroups(topology=topology, rank=rank, _by_use_and_span={})
    collectives: Collectives = NativeCollectives(groups, Links(InlineStreams()))
    if pieces is not None:
        collectives = PipelinedCollectives(groups, Links(InlineStreams()), pieces)
    return ShardingContext(
        topology=topology,
        rank=rank,
        strategy=strategy,
        comm_plan=make_comm_plan(strategy, topology),
        collectives=collectives,
        device=torch.device(device),
        compute_dtype=TYPES[precision.compute],
        frozen_dtype=TYPES[precision.frozen],
        reduce_dtype=TYPES[precision.wire],
        accumulate_dtype=TYPES[precision.accumulate],
        inter_param_bits=precision.inter_param_bits,
        ledger=Ledger(),
        exposure=Exposure(),
    )


def _empty_llama(
    config: LlamaConfig, precision: PrecisionConfig, is_trained: Callable[[str], bool]
) -> Llama:
    with torch.device("meta"):
        llama = Llama(config)
    llama.freeze(is_trained, activations=TYPES[precision.compute])
    return llama


def _lone(config: LlamaConfig, model: DistributedModel, precision: PrecisionConfig) -> LoneRank:
    collectives = model.context.collectives
    assert isinstance(collectives, (NativeCollectives, PipelinedCollectives, FlatCollectives))
    return LoneRank(
        config=config,
        model=model,
        optimizer=ParoOptimizer(model, OptimConfig(), precision, 0, MuonConfig()),
        traffic=collectives._wire._traffic,
    )


def allocated_at_most(work: Callable[[], object], device: str = "cpu") -> int:
    """The peak of bytes allocated by `work`, in addition to those before it."""
    if device == "cuda":
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated() - before
    # No collection frees what earlier tests left; one here would take longer than the work.
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            work()
    finally:
        gc.enable()
    assert recorded.profiler is not None
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events, "this torch records no allocations"
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()  # negative when freed
        peak = max(peak, allocated)
    return peak
