"""Collectives over runs of axes, by algorithm."""

COLLECTIVES = ("native", "flat", "ring", "h-ring", "ho-ring")
