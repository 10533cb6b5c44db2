"""Tests of paro/planning/step."""
