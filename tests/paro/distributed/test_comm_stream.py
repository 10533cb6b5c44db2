"""Lanes keep their order, wait for what they are told, and hand failures to whoever waits."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from paro.distributed.comm_stream import DONE, InlineLanes, Lanes, ThreadLanes, make_lanes

CPU = torch.device("cpu")


def test_which_lanes() -> None:
    assert isinstance(make_lanes(CPU, overlap=False, backend="gloo"), InlineLanes)
    assert isinstance(make_lanes(CPU, overlap=True, backend="gloo"), ThreadLanes)


@pytest.mark.parametrize("lanes", [InlineLanes(), ThreadLanes(CPU)])
def test_jobs_of_a_lane_run_in_order_and_without_gradients(lanes: Lanes) -> None:
    ran: list[int] = []
    grad_modes: list[bool] = []
    for number in range(100):
        last = lanes.submit("a", lambda number=number: ran.append(number))
    lanes.submit("a", lambda: grad_modes.append(torch.is_grad_enabled())).wait()
    last.wait()
    assert ran == list(range(100))
    assert grad_modes == [False]
    assert torch.is_grad_enabled()


def test_lanes_run_side_by_side_and_wait_across() -> None:
    lanes = ThreadLanes(CPU)
    gate = threading.Event()
    ran: list[str] = []

    def wait_at_the_gate() -> None:
        gate.wait(10)
        ran.append("slow")

    slow = lanes.submit("a", wait_at_the_gate)
    behind = lanes.submit("b", lambda: ran.append("behind"), after=slow)
    lanes.submit("c", lambda: ran.append("beside"), after=DONE).wait()
    assert ran == ["beside"]
    gate.set()
    behind.wait()
    assert ran == ["beside", "slow", "behind"]


def test_a_failure_is_raised_at_every_later_wait_and_nothing_runs_after_it() -> None:
    lanes = ThreadLanes(CPU)
    ran: list[str] = []

    def fail() -> None:
        raise RuntimeError("peer is gone")

    before = lanes.submit("a", lambda: ran.append("before"))
    before.wait()
    failed = lanes.submit("a", fail)
    behind = lanes.submit("b", lambda: ran.append("behind"), after=failed)
    for event in (failed, behind, lanes.submit("c", lambda: ran.append("later"))):
        with pytest.raises(RuntimeError, match="a collective failed") as caught:
            event.wait()
        assert str(caught.value.__cause__) == "peer is gone"
    assert ran == ["before"]


def test_without_overlap_a_failure_comes_at_once() -> None:
    def fail() -> None:
        raise RuntimeError("peer is gone")

    with pytest.raises(RuntimeError, match="peer is gone"):
        InlineLanes().submit("a", fail)


def test_whoever_waits_for_a_job_that_can_never_end_learns_of_the_failure() -> None:
    """One level of a collective waits for the other's, which was skipped after a failure."""
    lanes = ThreadLanes(CPU)
    never = threading.Event()

    def fail() -> None:
        raise RuntimeError("peer is gone")

    stuck = lanes.submit("a", lambda: bool(never.wait(30)))
    behind = lanes.submit("b", lambda: None, after=stuck)
    lanes.submit("c", fail)
    begin = time.monotonic()
    for event in (stuck, behind):
        with pytest.raises(RuntimeError, match="a collective failed on this rank"):
            event.wait()
    assert time.monotonic() - begin < 10
    never.set()
