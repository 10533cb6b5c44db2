"""Tests of paro/planning/search."""
