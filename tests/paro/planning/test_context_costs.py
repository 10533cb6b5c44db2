"""Time of attention among ranks that share samples: bytes on links, turns, and bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from model.config import RecomputeConfig
from model.trainable import Trainable
from paro.machine.machine import Nic
from paro.planning.comm_costs import THREAD, ContextCosts
from paro.planning.context_parallel import messages_of
from paro.planning.search_space import PlanRequest
from paro.planning.sending import Sender
from paro.planning.step_costs import StepCosts, simulate
from paro.spec.context_layout import ContextLayout
from paro.step.actions import Verb
from tests.paro.planning.cases import DEVICE, SMALL, compute_seconds, costs, machine, plan_request

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


def by_turns(
    hops: dict[str, tuple[float, float]], steps: int, turns: int, part: float, at_first: float
) -> float:
    """How long a pass round two rings takes, step by step; `hops` of keys and of their gradients.

    A ring sends one message after another. Sums follow the keys, as in ring.py.
    """
    now, free = 0.0, dict.fromkeys(hops, 0.0)

    def send(ring: str, heads: float = 1.0, *, is_sum: bool = False) -> float:
        free[ring] = max(now, free[ring]) + heads * hops[ring][is_sum]
        return free[ring]

    has_sums = hops["inner"][1] > 0
    in_group = between = 0.0  # when the last sum arrives

    def turn_of(number: int, heads: float) -> None:
        nonlocal now, in_group, between
        at_once = at_first if has_sums and not number and steps > 1 else 1.0
        for step in range(steps):
            arrival = send("inner", heads) if step < steps - 1 else 0.0
            now += heads * part * (1.0 if step else at_once)
            if has_sums and step:
                now = max(now, in_group if step > 1 else 0.0)
                in_group = send("inner", heads, is_sum=True)
            elif has_sums and number > 1:
                now = max(now, in_group, between)
                between = send("outer", is_sum=True)
            now = max(now, arrival)
        if has_sums and not number:
            now = max(now + heads * part * (1 - at_once), in_group)

    early = at_first if has_sums and turns > 1 else 1.0
    for number in range(turns):
        next_turn = send("outer") if number < turns - 1 else 0.0
        turn_of(number, 1.0 if number else early)
        now = max(now, next_turn)
    if has_sums and turns > 1:
        now = max(now, in_group, between)
        between = send("outer", is_sum=True)
        turn_of(0, 1 - early)
        now = max(now, between)
    return now


@pytest.mark.parametrize("inner", [1, 2, 4, 8])
@pytest.mark.parametrize("speed", [0.01, 0.1, 1, 10])
@pytest.mark.parametrize("verb", [Verb.FORWARD, Verb.GRADIENTS])
def test_turns_that_are_alike_take_as_long_as_one_by_one(
    inner: int, speed: float, verb: Verb
) -> None:
    faster = replace(DEVICE, sustained_flops=speed * 150e12, peak_flops=1e18)
    groups = machine(group_size=inner, device=faster)
    step = costs(shared(ContextLayout(size=8), group_size=inner, machine=groups))
    context, outer = context_of(step), 8 // inner
    messages = messages_of(step.computing.run)
    grads = messages.kv_grads if verb is Verb.GRADIENTS else 0
    hops = {
        ring: (messages.kv * 8 / rate, grads * 8 / rate)
        for ring, rate in (("inner", 2000e9), ("outer", 100e9))
    }
    seconds = step.computing.attention_seconds(1) * (2 if grads else 1)
    took = by_turns(hops, inner, outer, seconds / 8, messages.first_share)
    exact = 1e-9 if verb is Verb.FORWARD else 0.12
    exposed = sum(context.exposed(*one) for one in context.passes((verb, 1)))
    assert seconds + exposed == pytest.approx(took, rel=exact)


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
