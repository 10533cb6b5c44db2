"""Collectives over runs of axes, by algorithm."""

from paro.collectives.schedule import COLLECTIVES

__all__ = ["COLLECTIVES"]
