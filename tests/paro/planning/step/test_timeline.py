"""The simulated step: the bytes of the cost model, and bounds on its time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paro.collectives.schedule import Op
from paro.planning.cost_model import traffic_per_step
from paro.planning.machine.collective_time import CollectiveTimes, TimedJob
from paro.planning.machine.machine import GroupSpeed
from paro.planning.search.estimator import Estimator
from paro.planning.search.search_space import Workload
from paro.planning.step.costs import StepCosts
from paro.planning.step.simulation import Compute, Program, Queue, Queued, Simulation, Wait
from paro.planning.step.timeline import simulate
from paro.strategy import legal_letters
from tests.paro.planning.cases import DEVICE, compute_seconds, machine, workload


def costs(given: Workload, strategy: str) -> StepCosts:
    return Estimator(given).costs(given.candidate(given.strategy(strategy)))


@pytest.mark.parametrize("strategy", legal_letters())
def test_links_carry_the_bytes_of_the_cost_model(strategy: str) -> None:
    given = workload()
    step = costs(given, strategy)
    busy = step.busy(step.counts.of_step(step.num_micro_batches))
    units = given.trainable.units(given.model, world_size=32)
    sent = traffic_per_step(
        given.strategy(strategy),
        step.comm_costs.topology,
        units,
        given.precision,
        step.num_micro_batches,
    )
    assert busy["intra"] * 2000e9 / 8 == pytest.approx(sent.intra)
    assert busy["inter"] * 100e9 / 8 == pytest.approx(sent.inter)


@pytest.mark.parametrize("strategy", legal_letters())
def test_without_overlap_parts_add_up(strategy: str) -> None:
    step = costs(workload(prefetch_units=0), strategy)
    timeline = simulate(step)
    assert timeline.seconds == pytest.approx(step.least_seconds())
    assert timeline.compute_seconds == pytest.approx(compute_seconds(step))
    waited = timeline.seconds - timeline.compute_seconds
    assert timeline.exposed_seconds == pytest.approx(waited)


@pytest.mark.parametrize("strategy", [*legal_letters(), "2,4,16", "1,16,32", "16,2,32"])
@pytest.mark.parametrize("collective", ["native", "ho-ring", "h-ring", "ring", "flat"])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_nothing_is_faster_than_its_bound(strategy: str, collective: str, ahead: int) -> None:
    for inter, num_micro_batches in ((5, 1), (5, 9), (30, 2), (100, 9)):
        given = workload(
            machine=machine(inter=inter),
            collective=collective,
            prefetch_units=ahead,
            global_batch_size=64 * num_micro_batches,
        )
        step = costs(given, strategy)
        assert step.num_micro_batches == num_micro_batches
        assert simulate(step).seconds >= step.least_seconds() * (1 - 1e-9)


@pytest.mark.parametrize("strategy", ["IIG", "III", "NNN"])
def test_the_bound_is_near_where_passes_wait_for_gathers_or_reductions(strategy: str) -> None:
    """Some passes take as long as their compute, others as long as what they send."""
    for inter in (5, 15):
        step = costs(workload(machine=machine(inter=inter), global_batch_size=64 * 4), strategy)
        assert step.least_seconds() > 0.94 * simulate(step).seconds


@pytest.mark.parametrize("strategy", legal_letters())
def test_overlap_never_costs_time(strategy: str) -> None:
    step = costs(workload(), strategy)
    assert simulate(step).seconds <= simulate(
        costs(workload(prefetch_units=0), strategy)
    ).seconds * (1 + 1e-9)


@pytest.mark.parametrize("strategy", ["GGG", "IIG", "NGG"])
def test_micro_batches_in_the_middle_are_alike(strategy: str) -> None:
    step = costs(workload(global_batch_size=64 * 9), strategy)
    assert step.num_micro_batches == 9
    whole = simulate(step, record=True)
    assert simulate(step).seconds == pytest.approx(whole.seconds, rel=2e-3)


def test_a_job_takes_processor_time_and_is_slower_beside_computing() -> None:
    job = TimedJob(stream=(0,), seconds=1.0, intra=0.0, inter=1.0, cpu=0.5, slowed=2.0)

    def program() -> Program:
        for number in range(2):  # during computation, then while the thread waits
            yield Queue("", (Queued("", "", "", ((job,),)),))
            if number == 0:
                yield Compute(2.0, "", "")
                ends.append(simulation.now)
            yield Wait("")
            ends.append(simulation.now)

    ends: list[float] = []
    simulation = Simulation([(GroupSpeed(num_groups=1), program())])
    simulation.run()
    # The first job ends after 2 s and has taken half a second from the computing thread.
    assert ends == pytest.approx([2.5, 2.5, 3.5])


def test_a_job_beside_collectives_has_a_fixed_cost() -> None:
    """NII adds every unit's reduced gradient in a job of its own, and NNI none."""

    def seconds(strategy: str, **device: float) -> float:
        given = workload(machine=machine(device=replace(DEVICE, cores=0.25, **device)))
        return simulate(costs(given, strategy)).seconds

    cost, num_units, num_micro_batches = 1e-3, 6, 3
    assert seconds("NNI", job_seconds=cost) == seconds("NNI")
    added = seconds("NII", job_seconds=cost) - seconds("NII")
    assert added == pytest.approx(num_units * num_micro_batches * cost, rel=0.1)


def test_links_are_shared() -> None:
    given = workload()
    alone = simulate(costs(given, "IIG"))
    slow = simulate(costs(replace(given, machine=machine(intra=20)), "IIG"))
    assert slow.exposed["gather"] > 10 * alone.exposed["gather"]


def test_uneven_groups_slow_all_down() -> None:
    given = workload()
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
    whole = GroupSpeed(num_groups=4, compute=0.5)
    halved = replace(given, machine=machine(uneven=(whole,)))
    assert simulate(costs(halved, "NNN")).compute_seconds == pytest.approx(
        2 * simulate(costs(given, "NNN")).compute_seconds
    )


def test_ho_ring_hides_the_shorter_level() -> None:
    given = workload()
    native = CollectiveTimes(given.machine, "native")
    overlapped = CollectiveTimes(given.machine, "ho-ring")
    one_by_one = CollectiveTimes(given.machine, "h-ring")
    step = costs(given, "GGG")
    run = step.comm_costs.topology.axes_between(1, 32)
    sizes = [times.seconds(Op.ALL_GATHER, run, 1 << 30) for times in (native, one_by_one)]
    assert sizes[0] == pytest.approx(sizes[1])
    assert overlapped.seconds(Op.ALL_GATHER, run, 1 << 30) < 0.95 * sizes[0]
