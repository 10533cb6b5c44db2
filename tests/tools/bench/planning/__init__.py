"""Tests of tools/bench/planning."""
