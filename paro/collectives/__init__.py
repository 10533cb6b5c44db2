"""Collectives over runs of axes, by algorithm."""
