"""The time left by the clock on the wall, and times as text."""

from __future__ import annotations

import pytest

from paro.report.time_left import TimeLeft, duration


def test_it_counts_what_comes_between_iterations_and_not_the_first() -> None:
    now = 1000.0
    left = TimeLeft(100, clock=lambda: now)
    assert left.after(1, seconds=50.0) == 99 * 50.0
    now += 2.0
    assert left.after(2, seconds=2.0) == 98 * 2.0
    now += 2.0 + 6.0  # an evaluation
    assert left.after(3, seconds=2.0) == 97 * 5.0
    assert left.after(100, seconds=2.0) == 0.0


def test_a_change_of_pace_shows() -> None:
    now = 0.0
    left = TimeLeft(10_000, clock=lambda: now)
    for iteration in range(1, 4001):
        now += 1.0 if iteration <= 2000 else 3.0
        seconds = left.after(iteration, seconds=0.0)
    assert seconds == pytest.approx(6000 * 3.0)


def test_durations() -> None:
    assert [duration(s) for s in (-1, 59.6, 3723, 90061)] == [
        "0:00:00",
        "0:01:00",
        "1:02:03",
        "1 d 1:01:01",
    ]
