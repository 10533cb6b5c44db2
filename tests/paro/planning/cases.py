"""Small runs on hand-written machines; runs on any number of ranks, and one rank without peers."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from model.attention import Core
from model.config import LLAMA_PRESETS, LlamaConfig, RecomputeConfig
from model.llama import Llama
from model.trainable import Trainable
from model.units import parameter_shapes
from paro.collectives import wire
from paro.collectives.api import make_collectives
from paro.context_parallel.attention import make_context_attention
from paro.distributed.comm_stream import InlineStreams
from paro.distributed.control import PlannedControl
from paro.distributed.groups import ByteCounter, CommResources, Groups, make_groups
from paro.distributed.timers import Timers
from paro.distributed.world import World
from paro.layout import Unit, UnitLayout
from paro.machine.machine import (
    BandwidthSource,
    Device,
    LinkSpeed,
    Machine,
    rate_text,
)
from paro.optim.optimizer import ParoOptimizer
from paro.planning.estimator import Estimator
from paro.planning.search_space import PlanRequest, SearchSpace
from paro.planning.sending import NATIVE
from paro.planning.step_costs import StepCosts
from paro.precision import PrecisionConfig
from paro.sharding.buffers import TORCH_TYPES
from paro.sharding.distributed_model import DistributedModel
from paro.sharding.shards import ShardingContext
from paro.spec.context_layout import ContextLayout
from paro.spec.optim_config import OptimConfig
from paro.spec.run_spec import RunSpec
from paro.spec.units import units_of_run
from paro.step.actions import Action, ActionKind
from paro.step.schedule import StepSchedule
from paro.strategy import Strategy, parse_strategy
from paro.topology import Sent, Topology, make_topology
from paro.training import assembly
from tests.helpers.training import llama

DEVICE = Device(
    name="typed",
    memory_bytes=80_000_000_000,
    reserved_bytes=0,
    peak_flops=300e12,
    sustained_flops=150e12,
    memory_bytes_per_second=1.5e12,
    communicator_bytes=0,
    fragmentation=0.0,
)
BF16 = PrecisionConfig(compute="bf16", grad_reduce_in_bf16=True)
SMALL = replace(LLAMA_PRESETS["7B"], num_layers=4, hidden_size=512, ffn_hidden_size=1408)
FEW = SearchSpace(collectives=("native",), recomputes=(None, RecomputeConfig(granularity="full")))


def speed(gigabits: float, latency: float = 0.0) -> LinkSpeed:
    return LinkSpeed(
        bandwidth=rate_text(round(gigabits * 1e9)),
        latency_seconds=latency,
        bandwidth_source=BandwidthSource.TYPED,
    )


def machine(*, intra: float = 2000, inter: float = 100, **changes: Any) -> Machine:
    """Four groups of eight, links in Gbit/s without latency."""
    made = Machine(
        name="typed",
        source="",
        world_size=32,
        group_size=8,
        intra=speed(intra),
        inter=speed(inter),
        device=DEVICE,
    )
    return replace(made, **changes)


def plan_request(model: LlamaConfig = SMALL, **changes: Any) -> PlanRequest:
    given: dict[str, Any] = {
        "machine": machine(),
        "group_size": 8,
        "seq_length": 512,
        "micro_batch_size": 2,
        "global_batch_size": 192,
        "precision": BF16,
    }
    return PlanRequest(model=model, **(given | changes))


def costs(given: PlanRequest, strategy: str = "IIG") -> StepCosts:
    return Estimator(given).costs(given.candidate(given.strategy(strategy)))


def schedule_of(step: StepCosts) -> StepSchedule:
    return step.counts.schedule(step.run.num_micro_batches)


def compute_seconds(step: StepCosts) -> float:
    """Of the training thread, action by action."""
    of_actions = sum(step.computed(move)[1] for move in schedule_of(step).actions())
    return step.device.step_seconds + step.muon_seconds + of_actions


TINY = llama(3, 16, 32, heads=(2, 2, 8), length=16, vocab=64)
EACH = RecomputeConfig(granularity="full")
PAIRS = RecomputeConfig(granularity="full", num_layers=2)
ORDERS: dict[str, tuple[LlamaConfig, dict[str, Any]]] = {
    "plain": (TINY, {}),
    "tied": (replace(TINY, tie_embeddings_and_output_weights=True), {}),
    "recomputed": (replace(TINY, recompute=EACH), {}),
    "recomputed in pairs": (replace(TINY, num_layers=4, recompute=PAIRS), {}),
    "recomputed in pairs, the first of one frozen": (
        replace(TINY, num_layers=4, recompute=PAIRS),
        {"trainable": Trainable(share=0.25)},
    ),
    "mostly frozen": (TINY, {"trainable": Trainable(share=0.3)}),
}


def order_case(name: str, **more: Any) -> PlanRequest:
    """One of `ORDERS` on 2 groups of 2."""
    config, changes = ORDERS[name]
    return plan_request(
        config,
        machine=machine(world_size=4, group_size=2),
        group_size=2,
        seq_length=16,
        micro_batch_size=1,
        global_batch_size=8,
        **changes,
        **more,
    )


def on_ranks(text: str, *, world_size: int, group_size: int) -> tuple[Strategy, Topology]:
    """A strategy and the topology of its degrees."""
    strategy = parse_strategy(text, world_size=world_size, group_size=group_size)
    return strategy, make_topology(
        world_size=world_size, group_size=group_size, degrees=strategy.degrees
    )


def run_of(
    config: LlamaConfig,
    text: str,
    precision: PrecisionConfig,
    *,
    world_size: int = 8,
    group_size: int = 4,
    is_trained: Callable[[str], bool] = lambda _name: True,
    **changes: Any,
) -> RunSpec:
    """A run of two micro-batches of one sample, as the planner sees it."""
    given: dict[str, Any] = {
        "recompute": config.recompute,
        "seq_length": 16,
        "micro_batch_size": 1,
        "num_micro_batches": 2,
    }
    return RunSpec(
        model=config,
        trained=frozenset(filter(is_trained, parameter_shapes(config))),
        strategy=parse_strategy(text, world_size=world_size, group_size=group_size),
        precision=precision,
        world_size=world_size,
        group_size=group_size,
        **(given | changes),
    )


def one_unit(numel: int, *, frozen: int = 0) -> tuple[Unit, ...]:
    """A model as the paper counts it: everything is gathered twice per micro-batch."""
    trainable, rest = (UnitLayout((), matrix_stop=0, numel=size) for size in (numel, frozen))
    return (Unit(name="all", trainable=trainable, frozen=rest),)


def moves(count: int, *, frozen: int = 0) -> dict[Action, int]:
    """How often its collectives come in a step of `count` micro-batches."""
    of_step = {
        (ActionKind.GRAD_SYNC, 0): 1,
        (ActionKind.PARAM_ALL_GATHER, 0): 1,
        (ActionKind.REDUCE, 0): count,
    }
    return of_step | {(ActionKind.GATHER, buffer): 2 * count for buffer in range(1 + bool(frozen))}


def silence(monkeypatch: pytest.MonkeyPatch, backend: str = "nccl") -> None:
    """Makes torch.distributed leave buffers unchanged; gathered ones are filled with zeros."""

    def gather(whole: Tensor, shard: Tensor, group: None) -> None:
        whole.zero_()

    def transfer(op: object, tensor: Tensor, *_: object) -> None:
        if op is wire.dist.irecv:
            tensor.zero_()

    def receive(tensor: Tensor, *_: object, **__: object) -> SimpleNamespace:
        tensor.zero_()
        return done

    done = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(wire.dist, "P2POp", transfer)
    monkeypatch.setattr(wire.dist, "batch_isend_irecv", lambda transfers: [])
    monkeypatch.setattr(wire.dist, "isend", lambda *_, **__: done)
    monkeypatch.setattr(wire.dist, "irecv", receive)
    monkeypatch.setattr(wire, "_all_gather", gather)
    monkeypatch.setattr(wire, "_reduce_scatter", lambda own, whole, group: None)
    monkeypatch.setattr(wire.dist, "all_reduce", lambda whole, group: None)
    monkeypatch.setattr(wire.dist, "all_to_all_single", lambda received, sent, group: None)
    monkeypatch.setattr(wire.dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(Groups, "of", lambda *_: None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoneRank:
    """The model and the optimizer of one rank."""

    model: DistributedModel
    optimizer: ParoOptimizer
    traffic: ByteCounter

    def share_samples(self, layout: ContextLayout) -> None:
        """From now on attention is that of the first of ranks that share samples.

        The last one of a ring, whose queries see half of all other keys, allocates less.
        """
        context, topology = self.model.context, self.model.context.topology
        world = World(size=topology.world_size, group=topology.group_size)
        resources = CommResources(InlineStreams(), self.traffic, context.exposed_timer)
        self.model.model.core = attention_of(layout, world, resources)

    def step(
        self,
        num_micro_batches: int,
        *,
        size: int = 1,
        seq_length: int = 16,
        full_precision: bool = False,
    ) -> Sent:
        """Trains one step on made-up tokens; returns the bytes that the rank would have sent."""
        device = self.model.units[0].param_shard.device
        tokens_BS = torch.zeros(size, seq_length, dtype=torch.int64, device=device)
        weights_BS = torch.ones(size, seq_length, device=device)
        control, alone = PlannedControl(World(), device), self.optimizer.outer.is_on
        self.model.begin_step(num_micro_batches, full_precision=full_precision, alone=alone)
        for index in range(num_micro_batches):
            last = index + 1 == num_micro_batches
            self.model.forward_backward(tokens_BS, tokens_BS, weights_BS, last=last)
        self.model.finish_grad_sync()
        sent = self.traffic.take()
        self.optimizer.step(lr=0.0, weight_decay=0.0, grad_norm=1.0, unscale=0.5)
        self.optimizer.end_step(1, control)
        return sent


def attention_of(layout: ContextLayout, world: World, resources: CommResources) -> Core:
    """Attention of a rank that shares samples."""
    topology = layout.topology(world_size=world.size, group_size=world.group_size)
    groups = make_groups(topology, world.rank, {}, None, resources)
    return make_context_attention(layout, groups, NATIVE, "auto")


def rank_of(run: RunSpec, *, device: str = "cpu") -> LoneRank:
    """Builds the last rank of a run as training does; call `silence` before it runs."""
    world = World(rank=run.world_size - 1, size=run.world_size, group=run.group_size)
    with torch.device("meta"):
        llama = Llama(run.config)
    llama.freeze(run.trained.__contains__, activations=TORCH_TYPES[run.precision.compute])
    resources = CommResources(InlineStreams())
    control = PlannedControl(world, torch.device(device))
    groups = make_groups(run.topology, world.rank, {}, None, resources)
    collectives = make_collectives(assembly.choice_of(run.collective, None, by_nccl=False), groups)
    context = ShardingContext(run.strategy, collectives, control.device)
    model = assembly._spread(llama, run, run.specs(units_of_run(run)), context, Timers())
    optimizer = ParoOptimizer(model, run, OptimConfig(), seed=0)
    return LoneRank(model=model, optimizer=optimizer, traffic=resources.traffic)


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
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events, "this torch records no allocations"
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()  # negative when freed
        peak = max(peak, allocated)
    return peak
