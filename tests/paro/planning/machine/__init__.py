"""Tests of paro/planning/machine."""
