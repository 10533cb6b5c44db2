"""The gates of the study of recovery are in functions that exist."""

from __future__ import annotations

from importlib import import_module
from operator import attrgetter

from tools.bench.recovery.gated import POINTS


def test_the_points_are_functions() -> None:
    for point in POINTS.values():
        assert callable(attrgetter(point.name)(import_module(point.module)))
