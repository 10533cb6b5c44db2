"""The points at which faults strike are functions that exist."""

from __future__ import annotations

from importlib import import_module
from operator import attrgetter

from tests.faults.points import Point


def test_the_points_are_functions() -> None:
    for point in Point:
        module, _, name = point.partition(":")
        assert callable(attrgetter(name)(import_module(module)))
