"""Collectives over runs of axes, by algorithm."""

COLLECTIVES = ("native", "flat")
