"""The simulated step: bytes on links, bounds on its time, launches in order, shared samples."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest

from model.config import RecomputeConfig
from model.trainable import Trainable
from paro.distributed.groups import bounded_ctas
from paro.machine.collective_time import TimedJob
from paro.machine.machine import GroupSpeed
from paro.planning.comm_costs import THREAD
from paro.planning.context_parallel import AttentionPass, AttentionSend
from paro.planning.estimator import Estimator
from paro.planning.search_space import PlanRequest
from paro.planning.sending import Sender
from paro.planning.simulation import ComputeOp, Program, QueuedJobs, QueueOp, Simulation, WaitOp
from paro.planning.step_costs import _slowdowns, simulate
from paro.spec.context_layout import ContextLayout
from paro.spec.run_spec import Materialize
from paro.strategy import legal_letters
from tests.paro.planning.cases import (
    EACH,
    PAIRS,
    SMALL,
    compute_seconds,
    costs,
    machine,
    plan_request,
)

ROTATIONS = (Materialize.ROTATE, Materialize.ROTATE_IN_PLACE)
BY_WAY = [
    *product([Materialize.GATHER], [*legal_letters(), "2,4,16", "1,16,32", "16,2,32"]),
    *product(ROTATIONS, ["III", "IIG", "2,2,8", "4,4,16", "4,4,4"]),
]
SOME = [*product([Materialize.GATHER], ["NNG", "IIG", "GGG", "2,4,16"])]
LAST = Trainable(share=0.3)


@pytest.mark.slow("simulates steps of large models")
@pytest.mark.parametrize(("way", "strategy"), BY_WAY)
def test_links_carry_the_bytes_of_the_cost_model(way: Materialize, strategy: str) -> None:
    for recompute, tied in product((None, EACH, PAIRS), (False, True)):
        model = replace(SMALL, recompute=recompute, tie_embeddings_and_output_weights=tied)
        given = plan_request(model, materialize=way)
        estimator, candidate = Estimator(given), given.candidate(given.strategy(strategy))
        step, sent = estimator.costs(candidate), estimator.sent(candidate)
        busy = step.busy(step.counts.of_step(step.run.num_micro_batches))
        assert busy["intra"] * 2000e9 / 8 == pytest.approx(sent.intra)
        assert busy["inter"] * 100e9 / 8 == pytest.approx(sent.inter)


@pytest.mark.slow("simulates steps of large models")
@pytest.mark.parametrize(("way", "strategy"), BY_WAY)
def test_without_overlap_parts_add_up(way: Materialize, strategy: str) -> None:
    for recompute, trainable in product((None, EACH), (Trainable(), LAST)):
        model = replace(SMALL, recompute=recompute)
        given = plan_request(model, prefetch_units=0, materialize=way, trainable=trainable)
        step = costs(given, strategy)
        timeline = simulate(step)
        assert timeline.seconds == pytest.approx(step.least_seconds())
        assert timeline.compute_seconds == pytest.approx(compute_seconds(step))
        waited = timeline.seconds - timeline.compute_seconds
        assert sum(timeline.exposed.values()) == pytest.approx(waited)


@pytest.mark.slow("simulates steps of large models")
@pytest.mark.parametrize(
    ("collective", "way", "strategy"),
    [
        *(("native", *case) for case in SOME),
        *(("native", Materialize.GATHER, strategy) for strategy in ("NNN", "III")),
        *(("native", *case) for case in product(ROTATIONS, ("III", "2,2,8"))),
        *((name, *case) for name in ("ho-ring", "flat") for case in SOME),
    ],
)
def test_nothing_is_faster_than_its_bound(collective: str, way: Materialize, strategy: str) -> None:
    for intra, inter, num_micro_batches, recompute in (
        (2000, 5, 1, None),
        (2000, 5, 4, EACH),
        (2000, 30, 2, None),
        (2000, 100, 4, None),
        (20, 100, 3, EACH),
    ):
        times = []
        for ahead in (0, 1, 3):
            given = plan_request(
                replace(SMALL, recompute=recompute),
                machine=machine(intra=intra, inter=inter),
                collective=collective,
                materialize=way,
                prefetch_units=ahead,
                global_batch_size=64 * num_micro_batches,
            )
            step = costs(given, strategy)
            assert step.run.num_micro_batches == num_micro_batches
            times.append(simulate(step).seconds)
            assert times[-1] >= step.least_seconds() * (1 - 1e-9)
        assert max(times) <= times[0] * (1 + 1e-9), "overlap never costs time"


@pytest.mark.parametrize("strategy", ["IIG", "III", "NNN"])
def test_the_bound_is_near_where_passes_wait_for_gathers_or_reductions(strategy: str) -> None:
    """Some passes take as long as their compute, others as long as what they send."""
    for inter in (5, 15):
        step = costs(plan_request(machine=machine(inter=inter), global_batch_size=64 * 4), strategy)
        assert step.least_seconds() > 0.94 * simulate(step).seconds


def test_a_job_takes_processor_time_and_is_slower_beside_computing() -> None:
    job = TimedJob(stream=(0,), seconds=1.0, intra=0.0, inter=1.0, cpu=0.5, slowed=2.0)

    def program() -> Program:
        for number in range(2):  # during computation, then while the thread waits
            yield QueueOp("", (QueuedJobs("", "", "", ((job,),)),))
            if number == 0:
                yield ComputeOp(2.0, "", "")
                ends.append(simulation.now)
            yield WaitOp("")
            ends.append(simulation.now)

    ends: list[float] = []
    simulation = Simulation([(GroupSpeed(num_groups=1), program())])
    simulation.run()
    # The first job ends after 2 s and has taken half a second from the computing thread.
    assert ends == pytest.approx([2.5, 2.5, 3.5])


def test_collectives_slow_computing_down_by_their_number() -> None:
    job = second("", between=True).phases[0][0]
    own = job._replace(stream=(1,), inter=0.0, intra=1.0)
    copy = job._replace(stream=(2,), inter=0.0)  # no collective

    def program(*jobs: TimedJob) -> Program:
        yield QueueOp("", (QueuedJobs("", "", "", (jobs,)),))
        yield ComputeOp(2.0, "", "")

    def seconds(*jobs: TimedJob, slowed: Sequence[float] = (1.0, 1.25, 2.0)) -> float:
        speed = GroupSpeed(num_groups=1)
        return Simulation([(speed, program(*jobs))], slowed=slowed).run()

    # In the second of the jobs computing gets 1 / 1.25, or half, of a second further.
    assert seconds(job) == seconds(job, copy) == pytest.approx(1 + 1.2)
    assert seconds(job, own) == pytest.approx(1 + 1.5)
    assert seconds(copy) == seconds(job, own, slowed=()) == pytest.approx(2.0)


def test_collectives_occupy_the_thread_blocks_of_communicators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {})
    blocks = bounded_ctas(132, communicators=4)
    assert _slowdowns(((blocks, 1.5), (2 * blocks, 2.0)))[:4] == [1.0, 1.5, 2.0, 2.0]


def test_uneven_groups_slow_all_down() -> None:
    given = plan_request()
    even = simulate(costs(given, "IIG")).seconds
    slower = {}
    for name in ("compute", "intra", "inter"):
        group = GroupSpeed(num_groups=1, **{name: 0.25})
        uneven = replace(given, machine=machine(uneven=(group,)))
        slower[name] = simulate(costs(uneven, "IIG")).seconds
    assert slower["compute"] > 2 * even
    assert slower["inter"] > even
    same = GroupSpeed(num_groups=2)
    split = replace(given, machine=machine(uneven=(same,)))
    assert simulate(costs(split, "IIG")).seconds == pytest.approx(even)
    computing = simulate(costs(given, "NNN")).compute_seconds
    for speed in (0.5, 2.0):
        all_groups = GroupSpeed(num_groups=4, compute=speed)
        changed = replace(given, machine=machine(uneven=(all_groups,)))
        assert simulate(costs(changed, "NNN")).compute_seconds == pytest.approx(computing / speed)


def second(name: str, *, between: bool) -> QueuedJobs:
    """A second of communication, on one of two streams."""
    job = TimedJob(stream=(), seconds=1.0, intra=1.0 - between, inter=float(between), cpu=0.0)
    return QueuedJobs(name, "gather", name, ((job,),))


@pytest.mark.parametrize(("in_order", "seconds"), [(False, 1.0), (True, 2.0)])
def test_a_collective_waits_for_the_begin_of_all_before_it(in_order: bool, seconds: float) -> None:

    def program() -> Program:
        for number in range(2):
            yield QueueOp(number, (second("between", between=True),))
        yield QueueOp("last", (second("inside", between=False),))
        yield WaitOp("last")

    speed = GroupSpeed(num_groups=1)
    simulation = Simulation([(speed, program()) for _ in range(2)], launches_in_order=in_order)
    assert simulation.run() == pytest.approx(seconds)


# Attention among ranks that share samples: bytes on links, turns, and bounds

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
    sent = step.context.attention.sent(moves, Sender(group_size=group_size, rank=0))
    forward, backward = step.context.loads
    assert (forward["intra"] + backward["intra"]) * 2000e9 / 8 == pytest.approx(sent.intra)
    assert (forward["inter"] + backward["inter"]) * 100e9 / 8 == pytest.approx(sent.inter)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", AttentionPass)
def test_attention_waits_for_all_that_it_sends(name: str, kind: AttentionPass) -> None:
    """A wait names the last send of its key, so no send of a key may follow another unwaited."""
    under_way: set[str] = set()
    for one in costs(shared(LAYOUTS[name])).context.attention.schedule(kind):
        if isinstance(one, AttentionSend):
            assert one.messages
            assert one.key not in under_way
            under_way.add(one.key)
        elif isinstance(one, WaitOp):
            under_way.discard(one.key)
    assert not under_way


@pytest.mark.slow("simulates steps of large models")
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("strategy", ["NNG", "IIG", "GGG"])
def test_no_shared_sample_is_faster_than_its_bound(name: str, strategy: str) -> None:
    for inter, recompute in ((5, None), (100, "core"), (1000, "blocks")):
        given = shared(
            LAYOUTS[name], machine=machine(inter=inter), recompute=RECOMPUTES[recompute or ""]
        )
        step = costs(given, strategy)
        assert simulate(step).seconds >= step.least_seconds() * (1 - 1e-9)


@pytest.mark.parametrize("name", LAYOUTS)
def test_without_overlap_parts_of_shared_samples_add_up(name: str) -> None:
    """All that attention waits for is exposed; with overlap less of it is."""
    given = shared(LAYOUTS[name])
    step = costs(replace(given, prefetch_units=0))
    timeline = simulate(step)
    assert timeline.seconds == pytest.approx(step.least_seconds())
    assert timeline.compute_seconds == pytest.approx(compute_seconds(step))
    exposed = sum(timeline.exposed.values())
    assert timeline.seconds == pytest.approx(timeline.compute_seconds + exposed)
    forward, backward = step.context.loads
    waited = (forward[THREAD] + backward[THREAD]) * step.run.num_micro_batches
    assert timeline.exposed["context"] == pytest.approx(waited)
    assert simulate(costs(given)).exposed["context"] < waited
