"""Margins of compared trainings: every comparison is noted, and the closest of a run is printed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

MOST = 0.25  # of what is allowed: rounding differs between CPUs, by far less than fourfold


@dataclass(frozen=True, slots=True, order=True)
class Margin:
    """A difference of two runs divided by the largest that passes, and a name for it."""

    ratio: float
    label: str


_noted: list[Margin] = []


def note(margin: Margin) -> None:
    """Notes the margin for the test that runs; fails if the difference is larger than allowed."""
    _noted.append(margin)
    assert margin.ratio <= 1.0, f"{margin.ratio:.3g} times the allowed difference: {margin.label}"


def margin_of(value: float, wanted: float, allowed: float, label: str) -> Margin:
    """Returns how far a value is from the wanted one, in what is allowed; NaN is infinitely far."""
    difference = abs(value - wanted)
    if math.isnan(difference):
        return Margin(math.inf, label)
    return Margin(difference / allowed if difference else 0.0, label)


def assert_near(values: Iterable[float], wanted: Iterable[float], share: float, label: str) -> None:
    """Fails if a figure of a training is further from another's than a share of it."""
    for number, (value, want) in enumerate(zip(values, wanted, strict=True)):
        note(margin_of(value, want, share * abs(want), f"{label}, figure {number}"))


def take_closest() -> Margin | None:
    """Returns the largest ratio noted since the last call, if any."""
    closest = max(_noted, default=None)
    _noted.clear()
    return closest
