"""Collectives over axis spans: backend collectives, Ring, H-Ring and HO-Ring."""
