"""Timers of the requested levels."""

from __future__ import annotations

import time

from paro.distributed.timers import Timers


def test_names_up_to_the_level_are_timed_and_taken_once() -> None:
    timers = Timers(1)
    for _ in range(2):
        with timers.measure("forward-backward"), timers.measure("forward-compute", level=2):
            time.sleep(0.01)
    timers.add("interval-time", 2.0)
    timers.add("detail", 2.0, level=2)
    taken = timers.take()
    assert list(taken) == ["forward-backward", "interval-time"]
    assert taken["forward-backward"] >= 0.02
    assert timers.take() == Timers().take() == {}


def test_a_timer_waits_for_the_device_before_and_after() -> None:
    calls: list[str] = []
    timers = Timers(1, synchronize=lambda: calls.append("wait"))
    with timers.measure("optimizer"):
        calls.append("work")
    with timers.measure("batch-generator", level=2):
        calls.append("unmeasured")
    assert calls == ["wait", "work", "wait", "unmeasured"]
