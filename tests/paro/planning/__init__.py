"""Tests of paro/planning/."""
