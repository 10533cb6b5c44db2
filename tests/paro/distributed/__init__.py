"""Tests of paro/distributed."""
