"""Tests of paro/sharding/."""
