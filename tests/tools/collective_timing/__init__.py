"""Tests of the parts of bench_collectives.py."""
