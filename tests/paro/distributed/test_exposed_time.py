"""Comm streams keep order and propagate failures; exposed time is counted by wait and links."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
import torch

from paro.distributed.comm_stream import (
    DONE,
    AllEvents,
    CommStreams,
    CudaStreams,
    InlineStreams,
    ThreadStreams,
)
from paro.distributed.exposed_time import ExposedTime, ExposedTimer
from paro.distributed.timers import Timers
from paro.topology import StreamKind, WaitKind, make_topology

TOPOLOGY = make_topology(world_size=4, group_size=2, degrees=(2, 2, 4))
INTRA, INTER = ((StreamKind.GATHER, axis) for axis in TOPOLOGY.axes)
SECONDS = 0.05


def test_the_links_of_each_stage_get_the_time_that_was_waited_for_them() -> None:
    streams, exposed_timer = ThreadStreams(torch.device("cpu")), ExposedTimer()
    gate = threading.Event()
    between = streams.submit(INTER, gate.wait)
    inside = streams.submit(INTRA, partial(time.sleep, SECONDS), after=between)
    threading.Timer(0.3, gate.set).start()
    exposed_timer.wait(WaitKind.GATHER, AllEvents([inside]))
    exposed = exposed_timer.take()
    assert exposed.inter > 0.1  # of the 0.3, even if this thread began to wait late
    assert exposed.intra > SECONDS / 2
    assert exposed.gather >= exposed.intra + exposed.inter
    assert exposed.reduce == exposed.publish == 0.0
    assert exposed_timer.take() == ExposedTime(intra=0.0, inter=0.0)
    streams.close()


def test_what_overlaps_costs_nothing() -> None:
    streams, exposed_timer = ThreadStreams(torch.device("cpu")), ExposedTimer()
    ended = threading.Event()
    event = streams.submit(INTER, lambda: (time.sleep(SECONDS), ended.set())[0])
    ended.wait()
    event.wait()
    exposed_timer.wait(WaitKind.REDUCE, event)
    exposed_timer.wait(WaitKind.REDUCE, DONE)
    assert exposed_timer.take().total < SECONDS / 5
    streams.close()


def test_without_overlap_a_job_costs_what_it_takes() -> None:
    exposed_timer = ExposedTimer()
    streams = InlineStreams(exposed_timer.note)
    with exposed_timer.submitting(WaitKind.PARAM_ALL_GATHER):
        streams.submit(INTER, partial(time.sleep, SECONDS))
    exposed = exposed_timer.take()
    assert exposed.publish >= SECONDS
    assert SECONDS <= exposed.inter <= exposed.publish
    assert exposed.intra == 0.0


@pytest.mark.gpu
def test_streams_are_measured_on_the_device() -> None:
    streams, exposed_timer = CudaStreams(), ExposedTimer(on_streams=True)
    matrix = torch.randn(4096, 4096, device="cuda")

    def work() -> None:
        for _ in range(50):
            torch.mm(matrix, matrix)

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    exposed_timer.wait(WaitKind.GATHER, streams.submit(INTER, work))
    end.record()
    torch.cuda.synchronize()
    exposed = exposed_timer.take()
    assert exposed.gather > 0.001
    assert exposed.gather <= begin.elapsed_time(end) / 1000.0
    assert exposed.intra is exposed.inter is None
    streams.close()


def test_names_up_to_the_level_are_timed_and_taken_once() -> None:
    """A timer waits for the device before and after."""
    calls: list[str] = []
    timers = Timers(1, synchronize=lambda: calls.append("wait"))
    for _ in range(2):
        with timers.measure("forward-backward"), timers.measure("forward-compute", level=2):
            calls.append("work")
            time.sleep(0.01)
    assert calls == ["wait", "work", "wait"] * 2
    timers.add("interval-time", 2.0)
    timers.add("detail", 2.0, level=2)
    taken = timers.take()
    assert list(taken) == ["forward-backward", "interval-time"]
    assert taken["forward-backward"] >= 0.02
    assert timers.take() == Timers().take() == {}


CPU = torch.device("cpu")


def fail() -> None:
    raise RuntimeError("peer is gone")


@pytest.mark.parametrize("streams", [InlineStreams(), ThreadStreams(CPU)])
def test_jobs_of_a_lane_run_in_order_and_without_gradients(streams: CommStreams) -> None:
    ran: list[tuple[int, bool]] = []
    for number in range(100):
        job = lambda number=number: ran.append((number, torch.is_grad_enabled()))  # noqa: E731
        last = streams.submit("a", job)
    last.wait()
    assert ran == [(number, False) for number in range(100)]
    assert torch.is_grad_enabled()


def test_a_failure_is_raised_at_every_later_wait_and_nothing_runs_after_it() -> None:
    streams, ran = ThreadStreams(CPU), list[str]()
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
