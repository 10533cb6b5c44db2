"""Tests of paro/machine."""
