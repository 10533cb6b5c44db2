"""Groups that train alone (outer steps) and are killed, cut off, slow or not finite."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from paro.sharding.distributed_model import DistributedModel
from tests.faults.conftest import Scenario
from tests.faults.job import ITERATIONS, LIMIT_SECONDS, Job, Point, two_nodes

pytestmark = [pytest.mark.verify, pytest.mark.ranks]

# Two groups of one rank, rounds after iterations 5 and 9; in 7 and 8 no group waits for another.
ALONE = ("--paro-strategy", "NNN", "--paro-group-size", "1", "--log-interval", "6")
ALONE += ("--paro-outer-steps", "4", "--paro-outer-warmup", "1")
DELAY = ("--paro-outer-delay", "2")  # a round ends two iterations after it began
RARE = ("--save-interval", "12", "--eval-interval", "12")  # no round ends early for these
COPIES = ("--non-persistent-ckpt-type", "local", "--non-persistent-local-ckpt-dir")


@pytest.fixture(autouse=True)
def alone(scenario: Scenario) -> None:
    scenario.flags = ALONE


LOST: dict[str, Any] = {  # where rank 1 is killed, copies of both, whether its own are lost
    "between rounds": (Point.STEP, 8, (8, 7), False, ()),
    "in a round": (Point.ROUND, 2, (4, 4), False, ()),
    "between rounds, with its memory": (Point.STEP, 8, (8, 7), True, ()),
    "in a round, with its memory": (Point.ROUND, 2, (4, 4), True, ()),
    "with the other, while messages travel": (Point.STEP, 7, (4, 4), False, (*DELAY, *RARE)),
}


@pytest.mark.parametrize("where", LOST)
def test_a_group_is_killed(scenario: Scenario, tmp_path: Path, where: str) -> None:
    """With its copies it computes no iteration again; without, it begins as the other group."""
    target, call, iterations, is_lost, flags = LOST[where]
    scenario.flags += flags
    memory = tmp_path / "memory"
    job = killed(scenario, target, call, memory, iterations)
    scenario.ends(job, [-9 if flags else 1, -9], within=40.0)
    for path in memory.rglob("rank-00001-*") if is_lost else ():
        path.unlink()
    scenario.strikes()
    again = scenario.start(*COPIES, memory)
    again.wait_for(lambda: again.steps_printed() > 0)
    scenario.seconds_to_step = time.monotonic() - scenario._at
    assert again.end(60.0) == [0, 0], again.tail()
    assert f"continues after its iteration {iterations[0]}" in again.text()
    if is_lost:
        assert f"is lost: it continues after iteration {iterations[0]}" in again.text()
        assert scenario.run.saved() == ITERATIONS
    else:
        assert f"continues after its iteration {iterations[1]}" in again.text()
        scenario.is_saved_whole()


def killed(
    scenario: Scenario, target: Point, call: int, memory: Path, iterations: tuple[int, int]
) -> Job:
    """A job whose rank 1 is killed in a call, once both have copies of these iterations.

    Without torchrun, whose starts have an ID each: copies are of one job.
    """
    scenario.plain = True
    only = None if DELAY[0] in scenario.flags else 1
    job = scenario.paused(target, call, *COPIES, memory, only=only, at=only or 2)

    def copied(rank: int) -> bool:
        paths = memory.rglob(f"rank-{rank:05d}-*.json")
        return any(f'"iteration": {iterations[rank]},' in p.read_text("utf-8") for p in paths)

    job.wait_for(lambda: all(map(copied, range(2))))
    scenario.strikes()
    job.signal(signal.SIGKILL, 1)
    if only is None:  # otherwise rank 0 ends the round, as all messages have arrived
        job.signal(signal.SIGKILL, 0)
    return job


def test_a_group_is_killed_after_another_failure(scenario: Scenario, tmp_path: Path) -> None:
    """In the first local copy of the second start, which is not whole then."""
    memory = tmp_path / "memory"
    job = killed(scenario, Point.STEP, 8, memory, (8, 7))
    assert job.end(40.0) == [1, -9]
    (tmp_path / "paused_1").unlink()
    again = scenario.paused(Point.COPY, 1, *COPIES, memory, only=1, at=1)
    again.signal(signal.SIGKILL, 1)
    scenario.ends(again, [1, -9], within=40.0)
    third = scenario.start(*COPIES, memory)
    assert third.end(60.0) == [0, 0], third.tail()
    scenario.is_saved_whole()


def test_a_save_in_a_round(scenario: Scenario) -> None:
    """Iteration 6 is saved while the round that began after 5 is not merged."""
    scenario.flags += DELAY
    job = scenario.paused(Point.STEP, 8)
    job.signal(signal.SIGKILL, 1)
    scenario.ends(job, [1], within=40.0)
    scenario.strikes()
    assert scenario.run.saved() == 6
    again = scenario.start()
    assert again.end(60.0) == [0], again.tail()
    scenario.is_saved_whole()


@pytest.mark.root
def test_a_link_is_down_in_a_round(scenario: Scenario) -> None:
    """For half of the shortest limit, after which TCP sends again what was lost."""
    with two_nodes("rounds") as nodes:
        env = {"MASTER_ADDR": "10.78.0.1", "GLOO_SOCKET_IFNAME": "nic"}
        job = scenario.paused(Point.ROUND, 2, plain=True, before=nodes, env=env)
        nodes[0].set_link("down")
        scenario.run.release()
        time.sleep(LIMIT_SECONDS / 2)
        nodes[0].set_link("up")
        scenario.ends(job, [0, 0], within=LIMIT_SECONDS + 60)
    scenario.is_whole()


def _on_rank_1(change: Any) -> None:
    """For `before`: changes the arguments of each micro-batch of rank 1."""
    original = DistributedModel.forward_backward

    def changed(model: DistributedModel, *args: Any, **named: Any) -> Any:
        if os.environ.get("RANK") == "1":
            args = change(args)
        return original(model, *args, **named)

    setattr(DistributedModel, "forward_backward", changed)  # noqa: B010


def slow() -> None:
    """For `before`: rank 1 takes twice as long, and longer."""

    def later(args: Any) -> Any:
        time.sleep(0.1)
        return args

    _on_rank_1(later)


def not_finite() -> None:
    """For `before`: gradients of rank 1 are NaN in iteration 7."""
    calls = iter(range(10**6))

    def spoiled(args: Any) -> Any:
        is_seventh = next(calls) // 4 == 6
        return (*args[:2], args[2] * math.nan, *args[3:]) if is_seventh else args

    _on_rank_1(spoiled)


def test_a_group_is_slow(scenario: Scenario) -> None:
    """Groups wait at rounds for a slow one, and the run ends as one without it."""
    scenario.strikes()
    job = scenario.start(before=[slow])
    scenario.ends(job, [0], within=60.0)
    scenario.is_whole()


def test_gradients_of_a_group_are_not_finite(scenario: Scenario) -> None:
    """A group with NaN gradients skips its step alone, and all end with finite parameters."""
    scenario.strikes()
    job = scenario.start(before=[not_finite])
    scenario.ends(job, [0], within=60.0)
    assert scenario.run.saved() == ITERATIONS
    (*_, last) = scenario.run.steps()
    assert math.isfinite(last[2])
    assert scenario.run.final_sums() != scenario.undisturbed(2, *ALONE).final_sums()
