"""Comm streams keep order, wait for the jobs they depend on, and propagate failures."""

from __future__ import annotations

import threading

import pytest
import torch

from paro.distributed.comm_stream import DONE, CommStreams, InlineStreams, ThreadStreams

CPU = torch.device("cpu")


def fail() -> None:
    raise RuntimeError("peer is gone")


@pytest.mark.parametrize("streams", [InlineStreams(), ThreadStreams(CPU)])
def test_jobs_of_a_lane_run_in_order_and_without_gradients(streams: CommStreams) -> None:
    ran: list[int] = []
    grad_modes: list[bool] = []
    for number in range(100):
        last = streams.submit("a", lambda number=number: ran.append(number))
    streams.submit("a", lambda: grad_modes.append(torch.is_grad_enabled())).wait()
    last.wait()
    assert ran == list(range(100))
    assert grad_modes == [False]
    assert torch.is_grad_enabled()


def test_lanes_run_side_by_side_and_wait_across() -> None:
    streams = ThreadStreams(CPU)
    gate = threading.Event()
    ran: list[str] = []

    def wait_at_the_gate() -> None:
        gate.wait(10)
        ran.append("slow")

    slow = streams.submit("a", wait_at_the_gate)
    behind = streams.submit("b", lambda: ran.append("behind"), after=slow)
    streams.submit("c", lambda: ran.append("beside"), after=DONE).wait()
    assert ran == ["beside"]
    gate.set()
    behind.wait()
    assert ran == ["beside", "slow", "behind"]


def test_a_failure_is_raised_at_every_later_wait_and_nothing_runs_after_it() -> None:
    streams = ThreadStreams(CPU)
    ran: list[str] = []

    before = streams.submit("a", lambda: ran.append("before"))
    before.wait()
    failed = streams.submit("a", fail)
    behind = streams.submit("b", lambda: ran.append("behind"), after=failed)
    for event in (failed, behind, None):
        with pytest.raises(RuntimeError, match="a collective failed") as caught:
            # What is submitted before the failure may run beside it in another stream.
            (event or streams.submit("c", lambda: ran.append("later"))).wait()
        assert str(caught.value.__cause__) == "peer is gone"
    assert ran == ["before"]
    with pytest.raises(RuntimeError, match="peer is gone"):
        InlineStreams().submit("a", fail)  # without overlap at once


def test_whoever_waits_for_a_job_that_can_never_end_learns_of_the_failure() -> None:
    """One level of a collective waits for the other's, which was skipped after a failure."""
    streams = ThreadStreams(CPU)
    never = threading.Event()

    stuck = streams.submit("a", lambda: bool(never.wait()))
    behind = streams.submit("b", lambda: None, after=stuck)
    streams.submit("c", fail)
    for event in (stuck, behind):
        with pytest.raises(RuntimeError, match="a collective failed on this rank"):
            event.wait()
    never.set()
