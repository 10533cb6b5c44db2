"""NCCL's rule that a collective begins after all that were queued before it, and what it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from model.config import LLAMA_PRESETS
from paro.config.sharding import units_ahead
from paro.planning.machine.collective_time import TimedJob
from paro.planning.machine.files import find_machine
from paro.planning.machine.machine import GroupSpeed, LaunchOrder
from paro.planning.run_plan import Materialize
from paro.planning.step.simulation import Program, Queue, Queued, Simulation
from paro.planning.step.timeline import simulate
from tests.paro.planning.cases import costs, workload


def second(name: str, *, between: bool) -> Queued:
    """A second of communication, on one of two streams."""
    job = TimedJob(stream=(), seconds=1.0, intra=1.0 - between, inter=float(between), cpu=0.0)
    return Queued(name, "gather", name, ((job,),))


@pytest.mark.parametrize(("in_order", "seconds"), [(False, 1.0), (True, 2.0)])
def test_a_collective_waits_for_the_begin_of_all_before_it(in_order: bool, seconds: float) -> None:

    def program() -> Program:
        for number in range(2):
            yield Queue(number, (second("between", between=True),))
        yield Queue("last", (second("inside", between=False),), waits=True)

    speed = GroupSpeed(num_groups=1)
    simulation = Simulation([(speed, program()) for _ in range(2)], launches_in_order=in_order)
    assert simulation.run() == pytest.approx(seconds)


def step_seconds(
    machine: str, order: LaunchOrder, ahead: int | None, way: Materialize, nodes: int
) -> float:
    given = replace(find_machine(machine), launch_order=order)
    case = workload(
        replace(LLAMA_PRESETS["65B"], num_layers=16),
        machine=given.for_world(8 * nodes, subject=""),
        global_batch_size=2 * 8 * nodes * 2,
        updated_ahead=ahead,
        materialize=way,
    )
    return simulate(costs(case)).seconds


@pytest.mark.parametrize("way", [Materialize.GATHER, Materialize.ROTATE])
@pytest.mark.parametrize("machine", ["dgx-h100", "dgx-a100-roce100"])
def test_nccls_default_hides_updates_in_either_order(machine: str, way: Materialize) -> None:
    ahead = units_ahead(None, 1, by_nccl=True)
    free, implicit = (
        [step_seconds(machine, order, k, way, 4) for k in (None, ahead)]
        for order in ("free", "implicit")
    )
    assert implicit[0] > 1.01 * free[0], "at once, all updates come before the first gather"
    assert implicit[1] < implicit[0]
    assert free[1] < 1.01 * free[0]
