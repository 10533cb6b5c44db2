"""Time of attention among ranks that share samples: bytes on links, turns, and bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from model.config import RecomputeConfig
from model.trainable import Trainable
from paro.machine.machine import Nic
from paro.planning.comm_costs import THREAD, ContextCosts
from paro.planning.search_space import PlanRequest
from paro.planning.sending import Sender
from paro.planning.step_costs import StepCosts, simulate
from paro.spec.context_layout import ContextLayout
from tests.paro.planning.cases import SMALL, compute_seconds, costs, machine, plan_request

LAYOUTS = {
    "p2p in groups": ContextLayout(size=4),
    "p2p in a double ring": ContextLayout(size=16),
    "p2p across groups of one place": ContextLayout(size=4, heads=1, inner=1),
    "allgather": ContextLayout(size=16, gathers=True),
    "a2a": ContextLayout(size=8, heads=8),
    "a2a across groups": ContextLayout(size=16, heads=16),
    "a2a+p2p": ContextLayout(size=32, heads=8),
    "a2a+p2p in groups": ContextLayout(size=8, heads=4),
}
LAST_WEIGHTS = Trainable(patterns=("*.wo", "head.weight"))
RECOMPUTES = {
    "": None,
    "blocks": RecomputeConfig(granularity="full"),
    "core": RecomputeConfig(granularity="selective"),
    "blocks but for attention": RecomputeConfig(granularity="full", keeps_core=True),
}


def shared(layout: ContextLayout, **changes: object) -> PlanRequest:
    recompute = changes.pop("recompute", None)
    given = {"seq_length": 4096, "micro_batch_size": 1, "global_batch_size": 96} | changes
    return plan_request(replace(SMALL, recompute=recompute), context=layout, **given)


def context_of(step: StepCosts) -> ContextCosts:
    assert step.context is not None
    return step.context


@pytest.mark.parametrize(
    ("name", "recompute", "group_size", "trains"),
    [
        *((name, recompute, 8, "*") for name in LAYOUTS for recompute in RECOMPUTES),
        ("a2a", "", 1, "*"),
        *((name, "core", 8, "blocks.1.w_up") for name in LAYOUTS),
    ],
)
def test_links_carry_the_bytes_that_ranks_send(
    name: str, recompute: str, group_size: int, trains: str
) -> None:
    given = shared(
        LAYOUTS[name],
        recompute=RECOMPUTES[recompute],
        trainable=Trainable(patterns=(trains,)),
        machine=machine(group_size=group_size),
        group_size=group_size,
    )
    step = costs(given)
    moves = step.computing.step.schedule(1).actions()
    sent = context_of(step).attention.sent(moves, Sender(group_size=group_size, rank=0))
    forward, backward = context_of(step).loads
    assert (forward["intra"] + backward["intra"]) * 2000e9 / 8 == pytest.approx(sent.intra)
    assert (forward["inter"] + backward["inter"]) * 100e9 / 8 == pytest.approx(sent.inter)


@pytest.mark.parametrize(
    ("nic", "nics", "part"),
    [(Nic.PER_RANK, 1, 1.0), (Nic.SHARED, 1, 1 / 8), (Nic.SHARED, 4, 1 / 2)],
)
def test_a_flat_ring_leaves_a_group_by_one_nic(nic: Nic, nics: int, part: float) -> None:
    """A double ring leaves it by all; a shared link carries what all ranks of its group send."""
    slow = replace(machine(inter=1, nic=nic), nics=nics)

    def exposed(inner: int) -> float:
        layout = ContextLayout(size=32, inner=inner)
        return simulate(costs(shared(layout, machine=slow))).exposed["context"]

    messages = 31 / 3  # more than in the double ring's outer one
    assert exposed(32) / exposed(8) == pytest.approx(messages * part, rel=0.1)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("strategy", ["NNG", "IIG", "GGG"])
def test_nothing_is_faster_than_its_bound(name: str, strategy: str) -> None:
    for inter, recompute in ((5, None), (100, "core"), (1000, "blocks")):
        given = shared(
            LAYOUTS[name], machine=machine(inter=inter), recompute=RECOMPUTES[recompute or ""]
        )
        step = costs(given, strategy)
        assert simulate(step).seconds >= step.least_seconds() * (1 - 1e-9)


@pytest.mark.parametrize("name", LAYOUTS)
def test_without_overlap_parts_add_up(name: str) -> None:
    """All that attention waits for is exposed; with overlap less of it is."""
    given = shared(LAYOUTS[name])
    step = costs(replace(given, prefetch_units=0))
    timeline = simulate(step)
    assert timeline.seconds == pytest.approx(step.least_seconds())
    assert timeline.compute_seconds == pytest.approx(compute_seconds(step))
    exposed = sum(timeline.exposed.values())
    assert timeline.seconds == pytest.approx(timeline.compute_seconds + exposed)
    forward, backward = context_of(step).loads
    waited = (forward[THREAD] + backward[THREAD]) * step.run.num_micro_batches
    assert timeline.exposed["context"] == pytest.approx(waited)
    assert simulate(costs(given)).exposed["context"] < waited


def test_units_of_two_buffers_are_timed() -> None:
    """The update of a buffer has its number, of which there are then more than units."""
    given = shared(LAYOUTS["a2a"], trainable=LAST_WEIGHTS)
    step = costs(given)
    assert len(step.counts.buffers) > len(step.counts.units)
    assert simulate(step).seconds >= step.least_seconds() > 0


def test_attention_that_takes_nearly_all_of_a_step_is_counted_once() -> None:
    alone = costs(shared(ContextLayout(), seq_length=2**20))
    step = costs(shared(ContextLayout(size=8), seq_length=2**20))
    assert compute_seconds(step) == pytest.approx(compute_seconds(alone), rel=0.01)
    assert simulate(step).compute_seconds == pytest.approx(compute_seconds(step))
