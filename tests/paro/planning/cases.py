"""Small runs on hand-written machines, for tests of the planner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from model.config import LLAMA_PRESETS, LlamaConfig, RecomputeConfig
from model.trainable import Trainable
from paro.machine.machine import (
    BandwidthSource,
    Device,
    LinkSpeed,
    Machine,
    bits_per_second,
    rate_text,
)
from paro.planning.estimator import Estimator
from paro.planning.search_space import PlanRequest, SearchSpace
from paro.planning.step_costs import StepCosts
from paro.precision import PrecisionConfig
from paro.step.schedule import StepSchedule
from tests.helpers.flags import llama

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


def link(rate: str) -> LinkSpeed:
    """A link of a rate such as 100mbit, without latency."""
    return speed(bits_per_second(rate) / 1e9)


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
    """The actions of a step."""
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
