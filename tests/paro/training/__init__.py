"""Tests of paro/training."""
